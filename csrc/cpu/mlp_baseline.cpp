#include "cpu/level_baseline.h"

#include "cpu/mlp_kernels.h"

#include "cpu/level_end.h"
