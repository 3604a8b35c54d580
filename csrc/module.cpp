// overtone._C: importing it registers the CPU kernels with torch's dispatcher (each .cpp registers its own).
// pybind11 serves what is not a tensor op: CPU features and build information.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "cpu/bench/thread_latency.h"
#include "cpu/isa/isa.h"
#if defined(OVERTONE_WITH_CUDA)
#include "cuda/linalg/limit.h"
#endif

#define OVERTONE_STRINGIFY_(x) #x
#define OVERTONE_STRINGIFY(x) OVERTONE_STRINGIFY_(x)

namespace {

std::map<std::string, std::string> build_info() {
  return {
#if defined(__clang__)
      {"compiler", "clang " __clang_version__},
#else
      {"compiler", "gcc " __VERSION__},
#endif
      {"torch", OVERTONE_STRINGIFY(OVERTONE_BUILT_WITH_TORCH)},
      {"stable_abi", OVERTONE_STRINGIFY(TORCH_TARGET_VERSION)},
      {"optimization", OVERTONE_STRINGIFY(OVERTONE_OPTIMIZATION)},
      {"sanitizers", OVERTONE_STRINGIFY(OVERTONE_SANITIZERS)},
  };
}

// The compilers' builtin wants a literal, hence the macro.
std::map<std::string, bool> cpu_features() {
#if defined(__x86_64__)
#define OVERTONE_FEATURE(name) {name, __builtin_cpu_supports(name) != 0}
  return {
      OVERTONE_FEATURE("avx2"),     OVERTONE_FEATURE("fma"),        OVERTONE_FEATURE("f16c"),
      OVERTONE_FEATURE("avx512f"),  OVERTONE_FEATURE("avx512bw"),   OVERTONE_FEATURE("avx512dq"),
      OVERTONE_FEATURE("avx512vl"), OVERTONE_FEATURE("avx512bf16"), OVERTONE_FEATURE("amx-tile"),
      OVERTONE_FEATURE("amx-bf16"),
  };
#undef OVERTONE_FEATURE
#else
  return {};
#endif
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "CPU kernels of overtone, registered as torch.ops.overtone.*";
  m.def("available_isas", &overtone::available_isas, "Instruction sets this machine can run, lowest first.");
  m.def("isa", [] { return std::string(overtone::isa_name(overtone::current_isa())); }, "The instruction set in use.");
  m.def("set_isa", &overtone::set_isa, pybind11::arg("name"), "Cap the instruction set for this process.");
  m.def("last_kernel", &overtone::last_kernel, "The CPU kernel that ran last, as 'op/isa'.");
  m.def("cpu_features", &cpu_features, "CPU features the kernels could use, and whether this machine has them.");
  m.def("line_round_trip", &overtone::line_round_trip, pybind11::call_guard<pybind11::gil_scoped_release>(),
        "Seconds that a cache line takes from one of torch's threads to another and back; nan if there is no other.");
#if defined(OVERTONE_WITH_CUDA)
  m.attr("has_cuda") = true;
  m.def("cuda_limit", &overtone::cuda::cuda_limit, pybind11::arg("op"), pybind11::arg("dtype"), pybind11::arg("device"),
        "The most rows or columns that the CUDA kernels of eigh, eig or qr take on a device (-1: the current one).");
#endif
  m.def("build_info", &build_info, "How this extension was built.");
}
