#include "cpu/isa/baseline.h"

#include "cpu/linalg/eig/kernels.h"

#include "cpu/isa/end.h"
