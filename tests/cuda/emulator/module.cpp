// The CUDA kernels of csrc/cuda, run on the host by host_cuda.h, for Python. Tensors come as addresses.
#include <pybind11/pybind11.h>

#include "cuda/linalg/launch.h"
#include "emulator.h"
#include "mistakes.h"

namespace py = pybind11;
using namespace overtone::cuda;

namespace {

// How the stand-in runs a launch.
struct Runner {
  host_cuda::Order order;
  uint64_t seed;

  template <class Call>
  void operator()(void (*kernel)(Call), const Grid& grid, const Call& call) {
    const host_cuda::Launch launch{grid.blocks, grid.threads, grid.shared_bytes, order, seed};
    host_cuda::run(launch, [&] { kernel(call); });
  }
};

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

template <class T>
Matrices<T> matrices(uintptr_t data, const py::tuple& sizes, const py::tuple& strides) {
  return {pointer<const T>(data), sizes[0].cast<int64_t>(), strides[0].cast<int64_t>(), strides[1].cast<int64_t>(),
          strides[2].cast<int64_t>()};
}

template <class T>
void eigh(uintptr_t a, py::tuple sizes, py::tuple strides, bool upper, uintptr_t values, uintptr_t vectors,
          uintptr_t info, Path path, host_cuda::Order order, uint64_t seed) {
  const EighParams<T> call{
      matrices<T>(a, sizes, strides), sizes[1].cast<int>(), upper, pointer<T>(values), pointer<T>(vectors),
      pointer<int32_t>(info)};
  Runner runner{order, seed};
  launch_eigh(call, path, [&](auto... arguments) { runner(arguments...); });
}

template <class T>
void eig(uintptr_t a, py::tuple sizes, py::tuple strides, bool row_stochastic, uintptr_t values, uintptr_t workspace,
         uintptr_t info, Path path, host_cuda::Order order, uint64_t seed) {
  const EigParams<T> call{matrices<T>(a, sizes, strides), sizes[1].cast<int>(),  row_stochastic, pointer<T>(values),
                          pointer<T>(workspace),          pointer<int32_t>(info)};
  Runner runner{order, seed};
  launch_eig(call, path, [&](auto... arguments) { runner(arguments...); });
}

template <class T>
void qr(uintptr_t a, py::tuple sizes, py::tuple strides, int q_columns, int r_rows, uintptr_t q, uintptr_t r,
        uintptr_t info, host_cuda::Order order, uint64_t seed) {
  const QrCall<T> call{matrices<T>(a, sizes, strides),
                       sizes[1].cast<int>(),
                       sizes[2].cast<int>(),
                       q_columns,
                       r_rows,
                       pointer<T>(q),
                       pointer<T>(r),
                       pointer<int32_t>(info)};
  Runner runner{order, seed};
  launch_qr(call, [&](auto... arguments) { runner(arguments...); });
}

// Threads and bytes of shared memory of a block.
py::tuple as_tuple(const Grid& grid) { return py::make_tuple(grid.threads, grid.shared_bytes); }

template <class T>
void define(py::module_& m) {
  m.def("eigh", &eigh<T>);
  m.def("eig", &eig<T>);
  m.def("qr", &qr<T>);
  m.def("eigh_path", &eigh_path<T>);
  m.def("eig_path", &eig_path<T>);
  m.def("largest", &largest<T>);
  m.def("eigh_grid", [](int n, Path path) { return as_tuple(eigh_grid<T>(1, n, path)); });
  m.def("eig_grid", [](int n, Path path) { return as_tuple(eig_grid<T>(1, n, path)); });
  m.def("qr_grid", [](int n, Path) { return as_tuple(warp_grid<T>(1, QrSolver<T>::shared_size(n, n, n))); });
}

}  // namespace

PYBIND11_MODULE(host_cuda_kernels, m) {
  py::register_exception<host_cuda::Mistake>(m, "Mistake");
  py::enum_<host_cuda::Order>(m, "Order")
      .value("forward", host_cuda::Order::forward)
      .value("reverse", host_cuda::Order::reverse)
      .value("random", host_cuda::Order::random);
  py::enum_<Path>(m, "Path")
      .value("warp", Path::warp)
      .value("block", Path::block)
      .value("block_global", Path::block_global)
      .value("none", Path::none);
  m.attr("SHARED_EVERYWHERE") = kSharedEverywhere;
  py::module_ float32 = m.def_submodule("float32"), float64 = m.def_submodule("float64");
  define<float>(float32);
  define<double>(float64);
  m.def("mistake", [](const std::string& name, host_cuda::Order order, uint64_t seed) {
    return py::bytes(run_mistake(name, order, seed));
  });
}
