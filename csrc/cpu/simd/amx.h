// The tile registers of AMX: eight of them, each 16 rows of 64 bytes, which are 32 bfloat16 or 16 float32 numbers.
//
// A product adds A · B to C: A is 16 × 32 bfloat16 as it lies in memory; B, 32 × 16, has its rows in pairs, [16 pairs]
// [16 columns][2]; C is 16 × 16 float32. Every tile is used whole: operands are padded with zeros.
#pragma once

#include "cpu/simd/vector.h"

namespace overtone::OVERTONE_ISA {

constexpr int64_t kTileSize = 16;   // rows of a tile, and columns of B and C
constexpr int64_t kTileDepth = 32;  // columns of A, rows of B
constexpr int64_t kTileElements = kTileSize * kTileDepth;

#if !OVERTONE_HAS_AVX512BF16  // emulated

struct TileRegister {
  alignas(64) unsigned char rows[kTileSize][64];
};
inline thread_local TileRegister tile_registers[8];

// Tiles exist while one of these does, in its thread.
struct AmxSession {
  AmxSession() {}  // a name that is never read would warn otherwise
};

template <int kTile>
void tile_zero() {
  std::memset(&tile_registers[kTile], 0, sizeof(TileRegister));
}

template <int kTile, class T>
void tile_load(const T* p, int64_t stride) {
  for (int64_t row = 0; row < kTileSize; ++row) {
    std::memcpy(tile_registers[kTile].rows[row], p + row * stride, 64);
  }
}

template <int kTile>
void tile_store(float* p, int64_t stride) {
  for (int64_t row = 0; row < kTileSize; ++row) {
    std::memcpy(p + row * stride, tile_registers[kTile].rows[row], 64);
  }
}

template <int kC, int kA, int kB>
void tile_multiply() {
  BFloat16 a[kTileSize][kTileDepth];
  BFloat16 b[kTileSize][kTileSize][2];
  float c[kTileSize][kTileSize];
  std::memcpy(a, &tile_registers[kA], sizeof a);
  std::memcpy(b, &tile_registers[kB], sizeof b);
  std::memcpy(c, &tile_registers[kC], sizeof c);
  for (int64_t row = 0; row < kTileSize; ++row) {
    for (int64_t pair = 0; pair < kTileSize; ++pair) {
      const float even = widen(a[row][2 * pair]);
      const float odd = widen(a[row][2 * pair + 1]);
      for (int64_t column = 0; column < kTileSize; ++column) {
        c[row][column] += even * widen(b[pair][column][0]) + odd * widen(b[pair][column][1]);
      }
    }
  }
  std::memcpy(&tile_registers[kC], c, sizeof c);
}

#else

struct TileConfiguration {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfiguration) == 64);

// Tiles exist while one of these does, in its thread.
class AmxSession {
 public:
  AmxSession() {
    alignas(64) const TileConfiguration configuration;
    asm volatile("ldtilecfg %0" : : "m"(configuration) : "memory");
  }
  ~AmxSession() { asm volatile("tilerelease" : : : "memory"); }
  AmxSession(const AmxSession&) = delete;
  AmxSession& operator=(const AmxSession&) = delete;
};

// Our own assembly: GCC 12's intrinsics do not say that they read and write memory. Strides are in elements.
template <int kTile>
OVERTONE_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

template <int kTile, class T>
OVERTONE_INLINE void tile_load(const T* p, int64_t stride) {
  const int64_t bytes = stride * static_cast<int64_t>(sizeof(T));
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(bytes), "i"(kTile) : "memory");
}

template <int kTile>
OVERTONE_INLINE void tile_store(float* p, int64_t stride) {
  const int64_t bytes = stride * static_cast<int64_t>(sizeof(float));
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(bytes), "i"(kTile) : "memory");
}

template <int kC, int kA, int kB>
OVERTONE_INLINE void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

#endif

// Column tiles of B, each `depth_tiles` tiles one after the other; the next column begins `column_stride` elements on.
struct AmxPanels {
  const BFloat16* data;
  int64_t column_stride;

  OVERTONE_INLINE AmxPanels from(int64_t column) const { return {data + column * column_stride, column_stride}; }
};

// C = A · B, or C += A · B, of kRows × kColumns tiles: C is in the registers 0 to 3, A in 4 and 5, B in 6 and 7.
template <int kRows, int kColumns>
void multiply_tile_block(int64_t depth_tiles, const BFloat16* a, int64_t lda, AmxPanels b, float* c, int64_t ldc,
                         bool is_sum) {
  float* const c_below = c + kTileSize * ldc;
  if (is_sum) {
    tile_load<0>(c, ldc);
    if constexpr (kColumns == 2) tile_load<1>(c + kTileSize, ldc);
    if constexpr (kRows == 2) tile_load<2>(c_below, ldc);
    if constexpr (kRows == 2 && kColumns == 2) tile_load<3>(c_below + kTileSize, ldc);
  } else {
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
  }
  for (int64_t k = 0; k < depth_tiles; ++k) {
    tile_load<4>(a + k * kTileDepth, lda);
    tile_load<6>(b.data + k * kTileElements, kTileDepth);
    tile_multiply<0, 4, 6>();
    if constexpr (kColumns == 2) {
      tile_load<7>(b.data + b.column_stride + k * kTileElements, kTileDepth);
      tile_multiply<1, 4, 7>();
    }
    if constexpr (kRows == 2) {
      tile_load<5>(a + kTileSize * lda + k * kTileDepth, lda);
      tile_multiply<2, 5, 6>();
      if constexpr (kColumns == 2) tile_multiply<3, 5, 7>();
    }
  }
  tile_store<0>(c, ldc);
  if constexpr (kColumns == 2) tile_store<1>(c + kTileSize, ldc);
  if constexpr (kRows == 2) tile_store<2>(c_below, ldc);
  if constexpr (kRows == 2 && kColumns == 2) tile_store<3>(c_below + kTileSize, ldc);
}

// The same for any number of tiles, two by two.
inline void multiply_tiles(int64_t row_tiles, int64_t column_tiles, int64_t depth_tiles, const BFloat16* a, int64_t lda,
                           AmxPanels b, float* c, int64_t ldc, bool is_sum) {
  for (int64_t column = 0; column < column_tiles; column += 2) {
    for (int64_t row = 0; row < row_tiles; row += 2) {
      const BFloat16* a_block = a + row * kTileSize * lda;
      float* c_block = c + row * kTileSize * ldc + column * kTileSize;
      const bool has_two_rows = row + 1 < row_tiles;
      const bool has_two_columns = column + 1 < column_tiles;
      const auto multiply = has_two_rows ? (has_two_columns ? &multiply_tile_block<2, 2> : &multiply_tile_block<2, 1>)
                                         : (has_two_columns ? &multiply_tile_block<1, 2> : &multiply_tile_block<1, 1>);
      multiply(depth_tiles, a_block, lda, b.from(column), c_block, ldc, is_sum);
    }
  }
}

constexpr int64_t tiles_of(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

}  // namespace overtone::OVERTONE_ISA
