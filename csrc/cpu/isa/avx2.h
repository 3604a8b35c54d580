// Compiles the rest of this translation unit for AVX2 with FMA and F16C.
#pragma once

#include "cpu/isa/prelude.h"

#define OVERTONE_LEVEL avx2
#define OVERTONE_VECTOR_BYTES 32
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
