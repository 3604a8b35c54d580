#include "cpu/isa/baseline.h"

#include "cpu/linear/kernels.h"

#include "cpu/isa/end.h"
