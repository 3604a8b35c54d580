#include "cpu/isa/baseline.h"

#include "cpu/frequency/kernels.h"

#include "cpu/isa/end.h"
