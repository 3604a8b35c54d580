#include "cpu/isa/baseline.h"

#include "cpu/attention/kernels.h"

#include "cpu/isa/end.h"
