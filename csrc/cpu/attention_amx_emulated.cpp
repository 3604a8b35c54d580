#include "cpu/level_amx_emulated.h"

#include "cpu/attention_tiles_kernels.h"
