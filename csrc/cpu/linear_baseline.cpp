#include "cpu/level_baseline.h"

#include "cpu/linear_kernels.h"

#include "cpu/level_end.h"
