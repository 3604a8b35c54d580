#include "cpu/level_baseline.h"

#include "cpu/eig_kernels.h"

#include "cpu/level_end.h"
