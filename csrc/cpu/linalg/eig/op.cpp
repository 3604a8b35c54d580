// Nonsymmetric eigenproblems on CPU tensors: from the dispatcher to the kernels of the current ISA level.
// Shapes and types were validated by python/overtone/ops; what is checked here again is what memory safety needs.
#include "cpu/linalg/eig/params.h"

#include <algorithm>
#include <tuple>

#include "cpu/isa/isa.h"
#include "cpu/linalg/eig/lapack.h"
#include "cpu/tensor.h"

namespace overtone {
namespace {

constexpr int64_t kLargestForLanes = 512;

// Whether a matrix per lane is faster than LAPACK, which takes as long for n / lapack_speedup matrices as a group of
// lanes does (benchmarks/linalg/crossover.py; the figures for AVX-512 are those of a machine whose LAPACK uses it too).
// Threads must not matter, or they would change the bits.
bool prefer_lanes(const EigParams& call, int64_t groups) {
  const bool is_wide = vector_isa() == Isa::avx512;
  const int64_t speedup_without = !is_wide ? 110 : call.is_float64 ? 100 : 65;
  const int64_t speedup_with_vectors = !is_wide ? 70 : call.is_float64 ? 50 : 40;
  const int64_t lapack_speedup = call.right != nullptr ? speedup_with_vectors : speedup_without;
  return call.n <= kLargestForLanes && groups * call.n <= call.matrices.count * lapack_speedup;
}

// What is not wanted comes back empty. Eigenvectors are columns; left ones are scaled so that their products with the
// right ones are one.
std::tuple<Tensor, Tensor, Tensor, Tensor> eig_ex(Tensor a, bool row_stochastic, bool right, bool left) {
  constexpr const char* op = "eig";
  check_matrices(a, /*square=*/true, "A", op);
  const MatricesView matrices(a);
  EigParams call;
  call.matrices = matrices.batch;
  call.n = a.size(-1);
  call.is_float64 = a.scalar_type() == ScalarType::Double;
  call.row_stochastic = row_stochastic;
  call.threads = torch::stable::get_num_threads();
  const ScalarType complex_type = call.is_float64 ? ScalarType::ComplexDouble : ScalarType::ComplexFloat;
  const std::vector<int64_t> shape = sizes_of(a), none{0, 0};
  const std::vector<int64_t> of_values(shape.begin(), shape.end() - 1), leading(shape.begin(), shape.end() - 2);
  Tensor values = allocated(a, of_values, complex_type);
  Tensor right_vectors = allocated(a, right ? shape : none, complex_type);
  Tensor left_vectors = allocated(a, right && left ? shape : none, complex_type);
  Tensor info = allocated(a, leading, ScalarType::Int);
  call.eigenvalues = values.data_ptr();
  call.right = right ? right_vectors.data_ptr() : nullptr;
  call.left = right && left ? left_vectors.data_ptr() : nullptr;
  call.info = static_cast<int32_t*>(info.data_ptr());
  if (call.n == 0) {
    std::fill_n(call.info, call.matrices.count, kSolved);
  } else if (call.matrices.count > 0) {
    const auto& run = eig_kernels_table.get(op);
    const int64_t lanes = run.lanes(call.is_float64), groups = (call.matrices.count + lanes - 1) / lanes;
    if (row_stochastic || prefer_lanes(call, groups)) {
      const double n = static_cast<double>(call.n);
      parallel_items(groups, {50 * n * n * n}, [&](WorkQueue& queue) { run.eig(call, queue); });
    } else {
      record_kernel(op, "lapack");
      solve_by_lapack(call, run, a);
    }
  }
  return {values, right_vectors, left_vectors, info};
}

}  // namespace
}  // namespace overtone

STABLE_TORCH_LIBRARY_IMPL(overtone, CPU, m) { OVERTONE_IMPL_AS(m, eig_ex, "eig"); }
