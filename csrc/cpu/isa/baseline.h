// Compiles the rest of this translation unit for the baseline every 64-bit machine has.
#pragma once

#include "cpu/isa/prelude.h"

#define OVERTONE_LEVEL baseline
#define OVERTONE_VECTOR_BYTES 16
