// Ends what cpu/level_*.h began; the last include of a level's translation unit. GCC needs nothing.
#if defined(__clang__) && OVERTONE_VECTOR_BYTES > 16
#pragma clang attribute pop
#endif
