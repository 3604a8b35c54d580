// Compiles the rest of this translation unit with the tiles of AMX written out in plain C++: slow, the same on every
// machine, for tests of everything that surrounds the tile instructions.
#pragma once

#include "cpu/isa/prelude.h"

#define OVERTONE_LEVEL amx_emulated
#define OVERTONE_VECTOR_BYTES 16
#define OVERTONE_EMULATES_TILES
