#if defined(__x86_64__)
#include "cpu/level_avx512.h"

#include "cpu/mlp_kernels.h"

#include "cpu/level_end.h"
#endif
