#include "cpu/level_baseline.h"

#include "cpu/qr_kernels.h"

#include "cpu/level_end.h"
