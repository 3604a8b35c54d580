#include "cpu/isa/amx_emulated.h"

#include "cpu/attention/amx_kernels.h"
