// What a solver says of a matrix, on the CPU and on CUDA; InfoCode in python/overtone/types.py.
#pragma once

#include <cstdint>

namespace overtone {

// Solved; not finite or not converged; promised to be row-stochastic and is not.
enum Info : int32_t { kSolved = 0, kUnsolved = 1, kNotStochastic = 2 };

}  // namespace overtone
