// Compiles the rest of this translation unit for the instruction set that OVERTONE_ISA names (isa.h lists them), up to
// end.h. Includes before everything that kernel headers use from outside, so that inline functions of those headers are
// compiled for the baseline, whichever copy the linker keeps.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu/isa/dispatch.h"
#include "cpu/memory.h"
#include "cpu/parallel.h"

#define OVERTONE_VECTOR_BYTES OVERTONE_ISA_COLUMN(VECTOR_BYTES, OVERTONE_ISA)
#define OVERTONE_HAS_AVX512BF16 OVERTONE_ISA_COLUMN(HAS_AVX512BF16, OVERTONE_ISA)
#define OVERTONE_USES_AMX OVERTONE_ISA_COLUMN(USES_AMX, OVERTONE_ISA)

#define OVERTONE_PRAGMA_(text) _Pragma(#text)
#define OVERTONE_PRAGMA(text) OVERTONE_PRAGMA_(text)
// Wider vectors than the baseline's are x86-64's: elsewhere such a translation unit stays empty.
#if OVERTONE_VECTOR_BYTES == 16
#define OVERTONE_COMPILES_ISA 1
#elif !defined(__x86_64__)
#define OVERTONE_COMPILES_ISA 0
#else
#define OVERTONE_COMPILES_ISA 1
#if defined(__clang__)
OVERTONE_PRAGMA(clang attribute push(__attribute__((target(OVERTONE_ISA_COLUMN(TARGET, OVERTONE_ISA)))),
                                     apply_to = function))
#elif OVERTONE_VECTOR_BYTES == 64
OVERTONE_PRAGMA(GCC target(OVERTONE_ISA_COLUMN(TARGET, OVERTONE_ISA), "prefer-vector-width=512"))
#else
OVERTONE_PRAGMA(GCC target(OVERTONE_ISA_COLUMN(TARGET, OVERTONE_ISA)))
#endif
#endif
