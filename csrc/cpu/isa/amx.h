// Compiles the rest of this translation unit for AMX: tiles of bfloat16 (cpu/simd/amx.h) beside AVX-512 with its own
// rounding to bfloat16, which every machine with AMX has.
#pragma once

#include "cpu/isa/prelude.h"

#define OVERTONE_LEVEL amx
#define OVERTONE_VECTOR_BYTES 64
#define OVERTONE_ROUNDS_TO_BFLOAT16
#if defined(__clang__)
#pragma clang attribute push(                                                                                 \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,amx-tile,amx-bf16"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,prefer-vector-width=512")
#endif
