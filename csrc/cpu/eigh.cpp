// Symmetric eigenproblems on CPU tensors: from the dispatcher to the kernels of the current ISA level.
// Shapes and types were validated by python/overtone/ops; what is checked here again is what memory safety needs.
#include "cpu/eigh.h"

#include <algorithm>
#include <tuple>

#include "cpu/isa.h"
#include "cpu/tensor.h"

namespace overtone {
namespace {

const EighKernels& kernels(const char* op) {
#if defined(__x86_64__)
  static const EighKernels* const table[kIsaCount] = {&baseline::eigh_kernels, &avx2::eigh_kernels,
                                                      &avx512::eigh_kernels};
#else
  static const EighKernels* const table[kIsaCount] = {&baseline::eigh_kernels, nullptr, nullptr};
#endif
  const EighKernels& chosen = for_current_isa(table);
  note_kernel(op, chosen.level);
  return chosen;
}

std::tuple<Tensor, Tensor, Tensor> eigh_ex(Tensor a, bool upper, bool vectors) {
  constexpr const char* op = "eigh";
  STD_TORCH_CHECK(a.dim() >= 2 && a.size(-1) == a.size(-2) && a.is_cpu(), op, ": A must be a CPU tensor [..., n, n]");
  const MatricesView matrices(a);
  Eigh call;
  call.type = element_type(a, op, "A");
  STD_TORCH_CHECK(call.type == ElementType::float32 || call.type == ElementType::float64, op,
                  ": A must be float32 or float64");
  call.n = a.size(-1);
  call.upper = upper;
  call.a = matrices.batch;
  std::vector<int64_t> leading = sizes_of(a);
  leading.resize(leading.size() - 2);
  std::vector<int64_t> of_values = leading;
  of_values.push_back(call.n);
  Tensor out_values = torch::stable::new_empty(a, of_values);
  Tensor out_vectors = torch::stable::new_empty(a, vectors ? sizes_of(a) : std::vector<int64_t>{0, 0});
  Tensor info = torch::stable::new_empty(a, leading, ScalarType::Int);
  call.values = out_values.data_ptr();
  call.vectors = vectors ? out_vectors.data_ptr() : nullptr;
  call.info = static_cast<int32_t*>(info.data_ptr());
  if (call.n == 0) {
    std::fill_n(call.info, call.a.count, 0);
  } else if (call.a.count > 0) {
    const auto& run = kernels(op);
    const int64_t per_item = run.matrices_per_item(call);
    const int64_t items = (call.a.count + per_item - 1) / per_item;
    // About n³ multiplications; tens of thousands hide the cost of waking a thread.
    const int64_t grain = std::max<int64_t>(1, 32768 / (per_item * call.n * call.n * call.n));
    torch::stable::parallel_for(0, items, grain, [&](int64_t begin, int64_t end) { run.solve(call, begin, end); });
  }
  return {out_values, torch::stable::transpose(out_vectors, -2, -1), info};
}

}  // namespace
}  // namespace overtone

STABLE_TORCH_LIBRARY_IMPL(overtone, CPU, m) { m.impl("eigh_ex", TORCH_BOX(&overtone::eigh_ex)); }
