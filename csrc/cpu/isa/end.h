// Ends what begin.h began; the last include of such a translation unit. GCC needs nothing.
#if defined(__clang__) && OVERTONE_COMPILES_ISA && OVERTONE_VECTOR_BYTES > 16
#pragma clang attribute pop
#endif
