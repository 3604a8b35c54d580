#include "cpu/isa/isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <csetjmp>
#include <csignal>

#include "cpu/isa/amx_probe.h"
#endif

namespace overtone {
namespace {

#define OVERTONE_NAME(isa, ...) #isa,
constexpr const char* kNames[] = {OVERTONE_ISAS(OVERTONE_NAME)};
#undef OVERTONE_NAME
#define OVERTONE_VECTORS(isa, ...) Isa::OVERTONE_ISA_COLUMN(VECTORS, isa),
constexpr Isa kVectors[] = {OVERTONE_ISAS(OVERTONE_VECTORS)};
#undef OVERTONE_VECTORS

#if defined(__x86_64__) && defined(__linux__)
bool cpuid_has_amx() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  constexpr unsigned kBfloat16 = 1U << 22;
  constexpr unsigned kTile = 1U << 24;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kBfloat16) != 0 && (edx & kTile) != 0;
}

// Linux gives a process tiles only when it asks for them.
bool tiles_are_permitted() {
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

sigjmp_buf after_illegal_instruction;

// Some virtual machines offer AMX and then refuse its instructions: that must not end the process.
bool tiles_give_right_answers() {
  struct sigaction before{};
  struct sigaction escape{};
  escape.sa_handler = [](int) { siglongjmp(after_illegal_instruction, 1); };
  sigemptyset(&escape.sa_mask);
  if (sigaction(SIGILL, &escape, &before) != 0) {
    return false;
  }
  const bool is_right = sigsetjmp(after_illegal_instruction, 1) == 0 && amx::tile_product_is_right();
  sigaction(SIGILL, &before, nullptr);
  return is_right;
}

bool machine_has_amx() {
  static const bool has_amx = cpuid_has_amx() && tiles_are_permitted() && tiles_give_right_answers();
  return has_amx;
}
#elif defined(__x86_64__)
bool machine_has_amx() { return false; }
#endif

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
    case Isa::avx512_bf16:
      return machine_has(Isa::avx512) && __builtin_cpu_supports("avx512bf16");
    case Isa::amx:
      return machine_has(Isa::avx512_bf16) && machine_has_amx();
    case Isa::avx512_bf16_emulated:
    case Isa::amx_emulated:
      return true;
  }
  return false;
#else
  return isa == Isa::baseline || static_cast<int>(isa) >= kRealIsas;
#endif
}

Isa best_isa() {
  for (int isa = kRealIsas - 1; isa > 0; --isa) {
    if (machine_has(static_cast<Isa>(isa))) {
      return static_cast<Isa>(isa);
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
  for (int isa = 0; isa < kIsas; ++isa) {
    if (name == kNames[isa]) {
      if (!machine_has(static_cast<Isa>(isa))) {
        throw std::invalid_argument(source + ": this machine has no " + name + "; it has " + join(available_isas()));
      }
      return static_cast<Isa>(isa);
    }
  }
  throw std::invalid_argument(source + ": unknown instruction set '" + name + "'; wanted one of " +
                              join({kNames, kNames + kRealIsas}));
}

Isa initial_isa() {
  const char* cap = std::getenv("OVERTONE_CPU_ISA");
  return cap == nullptr || *cap == '\0' ? best_isa() : parse_isa(cap, "OVERTONE_CPU_ISA");
}

std::atomic<int>& isa_in_use() {
  static std::atomic<int> isa{static_cast<int>(initial_isa())};
  return isa;
}

thread_local const char* last_op = "";
thread_local const char* last_isa = "";

}  // namespace

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (int isa = 0; isa < kRealIsas; ++isa) {
    if (machine_has(static_cast<Isa>(isa))) {
      names.emplace_back(kNames[isa]);
    }
  }
  return names;
}

Isa current_isa() { return static_cast<Isa>(isa_in_use().load(std::memory_order_relaxed)); }

Isa vector_isa() { return kVectors[static_cast<int>(current_isa())]; }

void set_isa(const std::string& name) { isa_in_use().store(static_cast<int>(parse_isa(name, "set_isa"))); }

void record_kernel(const char* op, const char* isa) {
  last_op = op;
  last_isa = isa;
}

std::string last_kernel() { return std::string(last_op) + "/" + last_isa; }

}  // namespace overtone
