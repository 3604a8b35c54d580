#if defined(__x86_64__)
#include "cpu/isa/avx512.h"

#include "cpu/linear/kernels.h"

#include "cpu/isa/end.h"
#endif
