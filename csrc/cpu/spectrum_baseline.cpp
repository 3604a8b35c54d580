#include "cpu/level_baseline.h"

#include "cpu/spectrum_kernels.h"

#include "cpu/level_end.h"
