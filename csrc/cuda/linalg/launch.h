// Which kernel solves a call, with how many blocks, threads and bytes of shared memory. Used by nvcc's launches and by
// those of the host stand-in alike.
#pragma once

#include <string>

#include "cuda/linalg/eig/solver.h"
#include "cuda/linalg/eigh.h"
#include "cuda/linalg/qr.h"

namespace overtone::cuda {

struct Grid {
  unsigned blocks;
  unsigned threads;
  size_t shared_bytes;
};

// A warp per matrix; a block per matrix; a block per matrix of which only the Hessenberg form is in shared memory.
enum class Path { warp, block, block_global, none };

// Every architecture from sm_80 on gives a block that many bytes of shared memory; some more.
constexpr size_t kSharedEverywhere = 99 * 1024;
constexpr int kLargestEig = 240;
constexpr int kLargestQr = kWarp;
constexpr int kMaxThreads = BlockTeam<float>::kMaxWarps * kWarp;

template <class T>
constexpr Grid warp_grid(int64_t count, int numbers) {
  return {static_cast<unsigned>((count + kWarpsPerBlock - 1) / kWarpsPerBlock), kWarpsPerBlock * kWarp,
          kWarpsPerBlock * numbers * sizeof(T)};
}

template <class T>
constexpr Grid block_grid(int64_t count, int n, int numbers) {
  return {static_cast<unsigned>(count), static_cast<unsigned>(threads_for(n)), numbers * sizeof(T)};
}

template <class T>
constexpr Grid eigh_grid(int64_t count, int n, Path path) {
  return path == Path::warp ? warp_grid<T>(count, EighSolver<T, WarpTeam<T>>::shared_size(n))
                            : block_grid<T>(count, n, EighSolver<T, BlockTeam<T>>::shared_size(n));
}

template <class T>
constexpr Grid eig_grid(int64_t count, int n, Path path) {
  return path == Path::warp    ? warp_grid<T>(count, EigSolver<T, WarpTeam<T>, true>::shared_size(n))
         : path == Path::block ? block_grid<T>(count, n, EigSolver<T, BlockTeam<T>, true>::shared_size(n))
                               : block_grid<T>(count, n, EigSolver<T, BlockTeam<T>, false>::shared_size(n));
}

// `shared_limit`: bytes of shared memory that the device gives a block.
template <class T>
constexpr Path eigh_path(int n, size_t shared_limit) {
  return n <= kWarp                                                                         ? Path::warp
         : n <= kMaxThreads && eigh_grid<T>(1, n, Path::block).shared_bytes <= shared_limit ? Path::block
                                                                                            : Path::none;
}

template <class T>
constexpr Path eig_path(int n, size_t shared_limit) {
  return n <= kWarp                                                           ? Path::warp
         : n > kLargestEig                                                    ? Path::none
         : eig_grid<T>(1, n, Path::block).shared_bytes <= shared_limit        ? Path::block
         : eig_grid<T>(1, n, Path::block_global).shared_bytes <= shared_limit ? Path::block_global
                                                                              : Path::none;
}

// The most rows or columns of matrices that the kernels of `op`, one of eigh, eig and qr, take.
template <class T>
int largest(const std::string& op, size_t shared_limit) {
  int n = op == "qr" ? kLargestQr : kMaxThreads;
  while (op == "eigh" ? eigh_path<T>(n, shared_limit) == Path::none
                      : op == "eig" && eig_path<T>(n, shared_limit) == Path::none) {
    --n;
  }
  return n;
}

// What is promised for every architecture.
static_assert(eig_path<float>(197, kSharedEverywhere) == Path::block_global);
static_assert(eigh_path<float>(150, kSharedEverywhere) == Path::block);
static_assert(eigh_path<double>(104, kSharedEverywhere) == Path::block);

// launch(kernel, grid, call)
template <class T, class Launch>
void launch_eigh(const EighParams<T>& call, Path path, Launch launch) {
  const Grid grid = eigh_grid<T>(call.a.count, call.n, path);
  path == Path::warp ? launch(&eigh_warp<T>, grid, call) : launch(&eigh_block<T>, grid, call);
}

template <class T, class Launch>
void launch_eig(const EigParams<T>& call, Path path, Launch launch) {
  const Grid grid = eig_grid<T>(call.a.count, call.n, path);
  path == Path::warp    ? launch(&eig_warp<T>, grid, call)
  : path == Path::block ? launch(&eig_block<T, true>, grid, call)
                        : launch(&eig_block<T, false>, grid, call);
}

template <class T, class Launch>
void launch_qr(const QrCall<T>& call, Launch launch) {
  launch(&qr_warp<T>, warp_grid<T>(call.a.count, QrSolver<T>::shared_size(call.rows, call.columns, call.q_columns)),
         call);
}

}  // namespace overtone::cuda
