// inverse on CPU tensors: from the dispatcher to the kernels of the current ISA level.
// Shapes and types were validated by python/overtone/ops; what is checked here again is what memory safety needs.
#include <tuple>

#include "cpu/isa/isa.h"
#include "cpu/linalg/inverse/params.h"
#include "cpu/tensor.h"

namespace overtone {
namespace {

std::tuple<Tensor, Tensor> inverse_ex(Tensor a) {
  constexpr const char* op = "inverse";
  check_matrices(a, /*square=*/true, "A", op);
  const MatricesView matrices(a);
  std::vector<int64_t> sizes = sizes_of(a);
  Tensor inverse = allocated(a, sizes);
  sizes.resize(sizes.size() - 2);
  Tensor info = allocated(a, sizes, ScalarType::Int);
  const InverseParams params{dtype_of(a, op, "A"), a.size(-1), matrices.batch, inverse.data_ptr(),
                             static_cast<int32_t*>(info.data_ptr())};
  const auto& run = inverse_kernels_table.get(op).run;
  const double n = static_cast<double>(params.size);
  parallel_ranges(params.a.count, {4 * n * n * n}, [&](int64_t begin, int64_t end) { run(params, begin, end); });
  return {inverse, info};
}

}  // namespace
}  // namespace overtone

STABLE_TORCH_LIBRARY_IMPL(overtone, CPU, m) { OVERTONE_IMPL_AS(m, inverse_ex, "inverse"); }
