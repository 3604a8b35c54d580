// Memory of the kernels. Compiled once, for the baseline: what the files of every ISA level call must not be an inline
// function of one of them. No header from outside.
#pragma once

#include <cstdint>

namespace overtone {

// count elements of `size` bytes, aligned to a cache line. Throws OutOfMemory.
void* allocate_aligned(int64_t count, int64_t size);
void free_aligned(void* memory);

}  // namespace overtone
