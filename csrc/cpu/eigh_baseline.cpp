#include "cpu/level_baseline.h"

#include "cpu/eigh_kernels.h"

#include "cpu/level_end.h"
