// Everything from outside that kernel headers use. It is included before a level switches its instruction set on,
// so that inline functions of these headers are compiled for the baseline, whichever copy the linker keeps.
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

#include "cpu/memory.h"
