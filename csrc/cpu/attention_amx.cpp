#if defined(__x86_64__)
#include "cpu/level_amx.h"

#include "cpu/attention_tiles_kernels.h"

#include "cpu/level_end.h"
#endif
