#include "cpu/level_baseline.h"

#include "cpu/frequency_kernels.h"

#include "cpu/level_end.h"
