#include "cpu/isa/baseline.h"

#include "cpu/linalg/eigh/kernels.h"

#include "cpu/isa/end.h"
