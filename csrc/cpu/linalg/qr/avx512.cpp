#if defined(__x86_64__)
#include "cpu/isa/avx512.h"

#include "cpu/linalg/qr/kernels.h"

#include "cpu/isa/end.h"
#endif
