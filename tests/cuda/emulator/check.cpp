// Runs every kernel, or one of mistakes.h by its name, for the sanitizers to watch. Prints what ran.
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "cuda/linalg/launch.h"
#include "mistakes.h"

using namespace overtone::cuda;
using host_cuda::Order;

namespace {

using T = float;  // float64 runs through the same lines
constexpr int kCount = 5;
const Order kOrders[] = {Order::forward, Order::reverse, Order::random};

// Numbers that look random, the last matrix of them not finite.
std::vector<T> matrices(int n) {
  std::vector<T> a(kCount * n * n);
  uint64_t state = 1;
  for (T& x : a) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    x = static_cast<T>(state >> 40) / (1 << 23) - 1;
  }
  a.back() = kNaN<T>;
  return a;
}

// D⁻¹ A D, so that balancing has work to do; the trace is A's.
std::vector<T> graded(std::vector<T> a, int n) {
  for (size_t k = 0; k < a.size(); ++k) {
    const int i = static_cast<int>(k) / n % n, j = static_cast<int>(k) % n;
    a[k] *= std::ldexp(T(1), 24 * (j - i) / n);
  }
  return a;
}

bool fail(const char* what, int n) {
  std::printf("%s: wrong result at n = %d\n", what, n);
  return false;
}

// The eigenvalues' sum is the trace, in every matrix but the last.
bool check(const char* what, int n, const std::vector<T>& a, const std::vector<T>& values, int stride,
           const std::vector<int32_t>& info) {
  for (int m = 0; m < kCount; ++m) {
    double difference = 0;
    for (int i = 0; i < n; ++i) {
      difference += a[(m * n + i) * n + i] - values[(m * n + i) * stride];
    }
    const bool is_solved = info[m] == 0 && std::fabs(difference) < 1e-4 * n;
    if (is_solved != (m + 1 < kCount)) {
      return fail(what, n);
    }
  }
  return true;
}

auto runner(Order order) {
  return [order](auto kernel, const Grid& grid, const auto& call) {
    host_cuda::run({grid.blocks, grid.threads, grid.shared_bytes, order, 7}, [&] { kernel(call); });
  };
}

Matrices<T> batch(const std::vector<T>& a, int n) { return {a.data(), kCount, n * n, n, 1}; }

bool run_eigh(int n, Path path, Order order) {
  const std::vector<T> a = matrices(n);
  std::vector<T> values(kCount * n), vectors(kCount * n * n);
  std::vector<int32_t> info(kCount, -1);
  launch_eigh(EighParams<T>{batch(a, n), n, false, values.data(), vectors.data(), info.data()}, path, runner(order));
  return check("eigh", n, a, values, 1, info);
}

bool run_eig(const std::vector<T>& a, int n, Path path, Order order) {
  std::vector<T> values(kCount * n * 2), workspace(kCount * n * n);
  std::vector<int32_t> info(kCount, -1);
  launch_eig(EigParams<T>{batch(a, n), n, false, values.data(), workspace.data(), info.data()}, path, runner(order));
  return check("eig", n, a, values, 2, info);
}

bool run_eig(int n, Path path, Order order) {
  const std::vector<T> a = matrices(n);
  return run_eig(a, n, path, order) && run_eig(graded(a, n), n, path, order);
}

bool run_qr(int n, Order order) {
  const std::vector<T> a = matrices(n);
  std::vector<T> q(kCount * n * n), r(kCount * n * n);
  std::vector<int32_t> info(kCount, -1);
  launch_qr(QrCall<T>{batch(a, n), n, n, n, n, q.data(), r.data(), info.data()}, runner(order));
  double difference = 0;  // a₀₀ is q₀₀ r₀₀
  for (int m = 0; m + 1 < kCount; ++m) {
    difference += std::fabs(a[m * n * n] - q[m * n * n] * r[m * n * n]);
  }
  return (difference < 1e-4 && info[kCount - 1] == 1) || fail("qr", n);
}

bool run_kernels() {
  bool good = true;
  for (const Order order : kOrders) {
    for (const int n : {1, 6}) {
      good = run_eigh(n, Path::warp, order) && run_eig(n, Path::warp, order) && run_qr(n, order) && good;
    }
    for (const int n : {2, 36}) {
      good = run_eigh(n, Path::block, order) && run_eig(n, Path::block, order) &&
             run_eig(n, Path::block_global, order) && good;
    }
  }
  return good;
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) {
    try {
      run_mistake(arguments[1], Order::forward, 0);
    } catch (const host_cuda::Mistake& mistake) {
      std::printf("mistake: %s\n", mistake.what());
      return 3;
    }
    std::printf("%s ran\n", arguments[1]);
    return 0;
  }
  const bool good = run_kernels();
  std::printf("%s\n", good ? "every kernel ran" : "failed");
  return good ? 0 : 1;
}
