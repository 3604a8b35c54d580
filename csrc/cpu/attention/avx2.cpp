#if defined(__x86_64__)
#include "cpu/isa/avx2.h"

#include "cpu/attention/kernels.h"

#include "cpu/isa/end.h"
#endif
