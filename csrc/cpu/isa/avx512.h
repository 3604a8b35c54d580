// Compiles the rest of this translation unit for AVX-512 (F, BW, DQ, VL: every server since Skylake).
#pragma once

#include "cpu/isa/prelude.h"

#define OVERTONE_LEVEL avx512
#define OVERTONE_VECTOR_BYTES 64
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif
