#if defined(__x86_64__)
#include "cpu/isa/amx.h"

#include "cpu/attention/amx_kernels.h"

#include "cpu/isa/end.h"
#endif
