#include "cpu/isa/baseline.h"

#include "cpu/linalg/inverse/kernels.h"

#include "cpu/isa/end.h"
