#if defined(__x86_64__)
#include "cpu/isa/avx2.h"

#include "cpu/linalg/eig/kernels.h"

#include "cpu/isa/end.h"
#endif
