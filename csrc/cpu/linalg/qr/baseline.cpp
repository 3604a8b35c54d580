#include "cpu/isa/baseline.h"

#include "cpu/linalg/qr/kernels.h"

#include "cpu/isa/end.h"
