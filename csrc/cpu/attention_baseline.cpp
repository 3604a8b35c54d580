#include "cpu/level_baseline.h"

#include "cpu/attention_kernels.h"

#include "cpu/level_end.h"
