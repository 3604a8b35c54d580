#define OVERTONE_ISA amx
#include "cpu/isa/begin.h"
#if OVERTONE_COMPILES_ISA
#include "cpu/isa/amx_probe.h"
#include "cpu/simd/amx.h"

namespace overtone::amx {

bool tile_product_is_right() {
  alignas(64) BFloat16 a[kTileSize][kTileDepth];
  alignas(64) BFloat16 b[kTileSize][kTileSize][2];
  alignas(64) float c[kTileSize][kTileSize];
  const auto left = [](int64_t row, int64_t k) { return static_cast<float>((row * 7 + k * 3) % 11 - 5); };
  const auto right = [](int64_t k, int64_t column) { return static_cast<float>((k * 5 + column) % 13 - 6); };
  for (int64_t row = 0; row < kTileSize; ++row) {
    for (int64_t k = 0; k < kTileDepth; ++k) {
      narrow(left(row, k), &a[row][k]);
      narrow(right(k, row), &b[k / 2][row][k % 2]);
    }
  }
  {
    const AmxSession session;
    multiply_tile_block<1, 1>(1, &a[0][0], kTileDepth, {&b[0][0][0], 0}, &c[0][0], kTileSize, false);
  }
  bool is_right = true;
  for (int64_t row = 0; row < kTileSize; ++row) {
    for (int64_t column = 0; column < kTileSize; ++column) {
      float sum = 0;  // of small integers: exact in any order
      for (int64_t k = 0; k < kTileDepth; ++k) {
        sum += left(row, k) * right(k, column);
      }
      is_right &= c[row][column] == sum;
    }
  }
  return is_right;
}

}  // namespace overtone::amx

#endif
#include "cpu/isa/end.h"
