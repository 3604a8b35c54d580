// Symmetric eigenproblems on CPU tensors: from the dispatcher to the kernels of the current ISA level.
// Shapes and types were validated by python/overtone/ops; what is checked here again is what memory safety needs.
#include "cpu/eigh.h"

#include <algorithm>
#include <array>
#include <exception>
#include <limits>
#include <string>
#include <tuple>

#include "cpu/isa.h"
#include "cpu/tensor.h"

extern "C" int MKL_Set_Num_Threads_Local(int count) __attribute__((weak));

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

// Runs work(begin, end) over items of `per_item` matrices; about n³ operations each, of which tens of thousands hide
// the cost of waking a thread.
template <class Work>
void for_items(int64_t count, int64_t per_item, int64_t n, const Work& work) {
  const int64_t grain = std::max<int64_t>(1, 32768 / (per_item * n * n * n));
  if (count > 0) {
    torch::stable::parallel_for(0, (count + per_item - 1) / per_item, grain, work);
  }
}

ElementType solver_type(const Tensor& tensor, const char* op, const char* name) {
  const ElementType type = element_type(tensor, op, name);
  STD_TORCH_CHECK(type == ElementType::float32 || type == ElementType::float64, op, ": ", name,
                  " must be float32 or float64");
  return type;
}

// While it lives this thread's MKL, if torch has one, uses no other thread: with several its results would depend on
// how many there are, even inside a parallel region.
class OneBlasThread {
 public:
  OneBlasThread() {
    torch::stable::get_num_threads();  // torch sets the number itself when a thread first asks; not after us, then
    if (MKL_Set_Num_Threads_Local != nullptr) {
      before_ = MKL_Set_Num_Threads_Local(1);
    }
  }
  ~OneBlasThread() {
    if (MKL_Set_Num_Threads_Local != nullptr) {
      MKL_Set_Num_Threads_Local(before_);
    }
  }
  OneBlasThread(const OneBlasThread&) = delete;
  OneBlasThread& operator=(const OneBlasThread&) = delete;

 private:
  int before_ = 0;
};

// One matrix through torch's LAPACK. Throws if it does not converge.
std::tuple<Tensor, Tensor> lapack_eigh(const Tensor& a, bool upper, bool vectors) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(a),
                                    torch::stable::detail::from(std::string(upper ? "U" : "L")),
                                    torch::stable::detail::from(vectors)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::_linalg_eigh", "", stack.data(), TORCH_ABI_VERSION));
  return {torch::stable::detail::to<Tensor>(stack[0]), torch::stable::detail::to<Tensor>(stack[1])};
}

// The triangle of matrix `index`, to contiguous memory. Returns whether all of it is finite.
template <class A>
bool copy_triangle(const Eigh& call, int64_t index, A* out) {
  const A* source = static_cast<const A*>(call.a.data) + call.a.offsets[index];
  A not_finite = 0;
  for (int64_t i = 0; i < call.n; ++i) {
    for (int64_t j = call.upper ? i : 0; j < (call.upper ? call.n : i + 1); ++j) {
      const A element = source[i * call.a.row_stride + j * call.a.column_stride];
      out[i * call.n + j] = element;
      not_finite += element * 0;
    }
  }
  return not_finite == 0;
}

template <class A>
void solve_by_lapack(const Eigh& call, const Tensor& like, int64_t begin, int64_t end) {
  const int64_t n = call.n;
  // A matrix is copied to memory of its own, so that LAPACK sees the same alignment wherever it stands in the batch.
  Tensor matrix = torch::stable::new_zeros(like, {n, n});
  for (int64_t index = begin; index < end; ++index) {
    A* values = static_cast<A*>(call.values) + index * n;
    A* vectors = call.vectors == nullptr ? nullptr : static_cast<A*>(call.vectors) + index * n * n;
    try {
      STD_TORCH_CHECK(copy_triangle(call, index, static_cast<A*>(matrix.data_ptr())), "the matrix is not finite");
      const auto [found_values, found_vectors] = lapack_eigh(matrix, call.upper, vectors != nullptr);
      std::copy_n(static_cast<const A*>(found_values.data_ptr()), n, values);
      for (int64_t i = 0; i < n && vectors != nullptr; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          vectors[i * n + j] = static_cast<const A*>(
              found_vectors.data_ptr())[i * found_vectors.stride(1) + j * found_vectors.stride(0)];
        }
      }
      call.info[index] = 0;
    } catch (const std::exception&) {
      std::fill_n(values, n, std::numeric_limits<A>::quiet_NaN());
      if (vectors != nullptr) {
        std::fill_n(vectors, n * n, std::numeric_limits<A>::quiet_NaN());
      }
      call.info[index] = 1;
    }
  }
}

// Every matrix by itself, spread over the threads.
void solve_by_lapack(const Eigh& call, const Tensor& like) {
  torch::stable::parallel_for(0, call.a.count, 1, [&](int64_t begin, int64_t end) {
    const OneBlasThread one;
    call.type == ElementType::float64 ? solve_by_lapack<double>(call, like, begin, end)
                                      : solve_by_lapack<float>(call, like, begin, end);
  });
}

// Whether a matrix per lane is faster than LAPACK. Measured: an item takes as long as LAPACK takes for about n/20
// matrices with eigenvectors, n/45 without, whatever the lanes. Threads must not matter, or they would change the bits.
bool is_for_lanes(const Eigh& call, int64_t per_item) {
  const int64_t items = (call.a.count + per_item - 1) / per_item;
  return call.n <= 16 || items * call.n <= call.a.count * (call.vectors != nullptr ? 20 : 45);
}

std::tuple<Tensor, Tensor, Tensor> eigh_ex(Tensor a, bool upper, bool vectors) {
  constexpr const char* op = "eigh";
  STD_TORCH_CHECK(a.dim() >= 2 && a.size(-1) == a.size(-2) && a.is_cpu(), op, ": A must be a CPU tensor [..., n, n]");
  const MatricesView matrices(a);
  Eigh call;
  call.type = solver_type(a, op, "A");
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
  } else if (const auto& run = kernels(op); is_for_lanes(call, run.matrices_per_item(call))) {
    for_items(call.a.count, run.matrices_per_item(call), call.n,
              [&](int64_t begin, int64_t end) { run.solve(call, begin, end); });
  } else {
    note_kernel(op, "lapack");
    solve_by_lapack(call, a);
  }
  return {out_values, torch::stable::transpose(out_vectors, -2, -1), info};
}

std::tuple<Tensor, Tensor> eigh_backward(std::optional<Tensor> grad_values, std::optional<Tensor> grad_vectors,
                                         Tensor values, Tensor vectors, Tensor info) {
  constexpr const char* op = "eigh_backward";
  const std::vector<int64_t> shape = sizes_of(vectors);
  std::vector<int64_t> of_values = shape;
  of_values.pop_back();
  const std::vector<int64_t> leading(of_values.begin(), of_values.end() - 1);
  EighBackward call;
  call.type = solver_type(vectors, op, "eigenvectors");
  const auto is_like = [&](const Tensor& tensor, const std::vector<int64_t>& wanted) {
    return has_shape(tensor, wanted) && tensor.scalar_type() == vectors.scalar_type() && tensor.is_cpu();
  };
  STD_TORCH_CHECK(
      shape[shape.size() - 1] == shape[shape.size() - 2] && is_like(vectors, shape) && is_like(values, of_values) &&
          values.is_contiguous() &&
          (!grad_values.has_value() || (is_like(*grad_values, of_values) && grad_values->is_contiguous())) &&
          (!grad_vectors.has_value() || is_like(*grad_vectors, shape)),
      op, ": eigenvalues [..., n] must be contiguous, eigenvectors [..., n, n], gradients like them");
  STD_TORCH_CHECK(has_shape(info, leading) && info.scalar_type() == ScalarType::Int && info.is_contiguous(), op,
                  ": info must be int32, one per matrix");
  call.n = shape.back();
  const MatricesView by_row(torch::stable::transpose(vectors, -2, -1));
  call.vectors = by_row.batch;
  call.values = values.data_ptr();
  call.info = static_cast<const int32_t*>(info.data_ptr());
  call.grad_values = grad_values.has_value() ? grad_values->data_ptr() : nullptr;
  std::optional<MatricesView> grad_view;
  if (grad_vectors.has_value()) {
    grad_view.emplace(*grad_vectors);
    call.grad_vectors = grad_view->batch;
  }
  Tensor grad_a = torch::stable::new_empty(vectors, shape);
  std::vector<int64_t> of_pairs = leading;
  of_pairs.push_back(2);
  Tensor pair = torch::stable::new_empty(vectors, of_pairs, ScalarType::Int);
  call.grad_a = grad_a.data_ptr();
  call.pair = static_cast<int32_t*>(pair.data_ptr());
  if (call.n == 0) {
    std::fill_n(call.pair, 2 * call.vectors.count, -1);
  } else {
    const auto& run = kernels(op);
    for_items(call.vectors.count, run.matrices_per_backward_item(call), call.n,
              [&](int64_t begin, int64_t end) { run.backward(call, begin, end); });
  }
  return {grad_a, pair};
}

}  // namespace
}  // namespace overtone

STABLE_TORCH_LIBRARY_IMPL(overtone, CPU, m) {
  m.impl("eigh_ex", TORCH_BOX(&overtone::eigh_ex));
  m.impl("eigh_backward", TORCH_BOX(&overtone::eigh_backward));
}
