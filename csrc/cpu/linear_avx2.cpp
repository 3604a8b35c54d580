#if defined(__x86_64__)
#include "cpu/level_avx2.h"

#include "cpu/linear_kernels.h"

#include "cpu/level_end.h"
#endif
