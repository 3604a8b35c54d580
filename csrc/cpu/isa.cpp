#include "cpu/isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace overtone {
namespace {

constexpr const char* kNames[kIsaCount] = {"baseline", "avx2", "avx512"};

// GCC's and Clang's builtin asks the operating system (XGETBV) as well as CPUID.
bool machine_has(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::baseline:
      return true;
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    case Isa::avx512:
      return machine_has(Isa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  return false;
#else
  return isa == Isa::baseline;
#endif
}

Isa best_isa() {
  for (int level = kIsaCount - 1; level > 0; --level) {
    if (machine_has(static_cast<Isa>(level))) {
      return static_cast<Isa>(level);
    }
  }
  return Isa::baseline;
}

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) {
    text += (text.empty() ? "" : ", ") + word;
  }
  return text;
}

Isa parse_isa(const std::string& name, const std::string& source) {
  for (int level = 0; level < kIsaCount; ++level) {
    if (name == kNames[level]) {
      if (!machine_has(static_cast<Isa>(level))) {
        throw std::invalid_argument(source + ": this machine has no " + name + "; it has " + join(available_isas()));
      }
      return static_cast<Isa>(level);
    }
  }
  throw std::invalid_argument(source + ": unknown instruction set '" + name +
                              "'; wanted one of baseline, avx2, avx512");
}

Isa initial_isa() {
  const char* cap = std::getenv("OVERTONE_CPU_ISA");
  return cap == nullptr || *cap == '\0' ? best_isa() : parse_isa(cap, "OVERTONE_CPU_ISA");
}

std::atomic<int>& isa_in_use() {
  static std::atomic<int> isa{static_cast<int>(initial_isa())};
  return isa;
}

std::atomic<const char*> last_op{""};
std::atomic<const char*> last_level{""};

}  // namespace

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (int level = 0; level < kIsaCount; ++level) {
    if (machine_has(static_cast<Isa>(level))) {
      names.emplace_back(kNames[level]);
    }
  }
  return names;
}

Isa current_isa() { return static_cast<Isa>(isa_in_use().load(std::memory_order_relaxed)); }

void set_isa(const std::string& name) { isa_in_use().store(static_cast<int>(parse_isa(name, "set_isa"))); }

void note_kernel(const char* op, const char* level) {
  last_op.store(op, std::memory_order_relaxed);
  last_level.store(level, std::memory_order_relaxed);
}

std::string last_kernel() { return std::string(last_op.load()) + "/" + last_level.load(); }

}  // namespace overtone
