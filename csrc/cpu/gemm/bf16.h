// Products of bfloat16 with float32 sums, by what the instruction set has for them: AMX's tiles, or vdpbf16ps, which
// adds the products of a pair of numbers to every lane's sum.
//
// Both want B in the same panels: 16 columns, their rows in pairs, [depth / 2][16][2], the depth filled up with zeros
// to whole tiles. A is read row by row as it lies.
#pragma once

#include "cpu/gemm/microkernel.h"
#include "cpu/gemm/pack_amx.h"
#include "cpu/simd/amx.h"

namespace overtone::OVERTONE_ISA {

#if OVERTONE_USES_AMX
// What is read and written of A and C: whole tiles.
constexpr int64_t kWholeRows = kTileSize;
constexpr int64_t kWholeDepth = kTileDepth;
using Bf16Session = AmxSession;
#else
constexpr int64_t kWholeRows = 1;
constexpr int64_t kWholeDepth = 2;
struct Bf16Session {
  Bf16Session() {}  // a name that is never read would warn otherwise
};

// sum + a.first · b.first + a.second · b.second in every lane.
OVERTONE_INLINE Vector<float> add_pair_products(Vector<float> sum, Words a, Words b) {
#if OVERTONE_HAS_AVX512BF16
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
  const auto first = [](Words pair) { return (Vector<float>)(pair << 16); };
  const auto second = [](Words pair) { return (Vector<float>)(pair & 0xffff0000u); };
  return sum + first(a) * first(b) + second(a) * second(b);
#endif
}

// Rows of a block, as many as the registers hold sums of, where it is `kVectors` wide.
template <int kVectors>
inline constexpr int kPairRows = kVectors == 1 || kWidestTile == 2 ? kTileRows<kVectors> : 24 / kVectors;

// kRows × kVectors vectors of C, from its `first` vector on.
template <int kRows, int kVectors>
void multiply_pairs(int first, int64_t pairs, const BFloat16* a, int64_t lda, const AmxPanels& b, float* c, int64_t ldc,
                    bool is_sum) {
  constexpr int kParts = static_cast<int>(kTileSize) / kLanes<float>;  // of a panel's row
  const BFloat16* panel[kVectors];
  OVERTONE_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    panel[v] = b.data + (first + v) / kParts * b.column_stride + (first + v) % kParts * 2 * kLanes<float>;
  }
  float* out = c + first * kLanes<float>;
  Vector<float> sums[kRows][kVectors] = {};
  if (is_sum) {
    OVERTONE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      OVERTONE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        sums[i][v] = load_full(out + i * ldc + v * kLanes<float>);
      }
    }
  }
  for (int64_t k = 0; k < pairs; ++k) {
    Words row[kVectors];
    OVERTONE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      std::memcpy(&row[v], static_cast<const void*>(panel[v] + k * 2 * kTileSize), sizeof row[v]);
    }
    OVERTONE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      uint32_t pair;
      std::memcpy(&pair, static_cast<const void*>(a + i * lda + 2 * k), sizeof pair);
      const Words pair_everywhere = pair - Words{};
      OVERTONE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        sums[i][v] = add_pair_products(sums[i][v], pair_everywhere, row[v]);
      }
    }
  }
  OVERTONE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    OVERTONE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      store_full(sums[i][v], out + i * ldc + v * kLanes<float>);
    }
  }
}

// The rows below the last whole block: fewer than kRows, in a block of their own.
template <int kRows, int kVectors>
void multiply_last_pairs(int64_t rows, int first, int64_t pairs, const BFloat16* a, int64_t lda, const AmxPanels& b,
                         float* c, int64_t ldc, bool is_sum) {
  if constexpr (kRows > 1) {
    if (rows == kRows - 1) {
      multiply_pairs<kRows - 1, kVectors>(first, pairs, a, lda, b, c, ldc, is_sum);
    } else {
      multiply_last_pairs<kRows - 1, kVectors>(rows, first, pairs, a, lda, b, c, ldc, is_sum);
    }
  }
}

template <int kVectors>
void multiply_pair_columns(int64_t rows, int first, int64_t pairs, const BFloat16* a, int64_t lda, const AmxPanels& b,
                           float* c, int64_t ldc, bool is_sum) {
  constexpr int kRows = kPairRows<kVectors>;
  int64_t i = 0;
  for (; i + kRows <= rows; i += kRows) {
    multiply_pairs<kRows, kVectors>(first, pairs, a + i * lda, lda, b, c + i * ldc, ldc, is_sum);
  }
  multiply_last_pairs<kRows, kVectors>(rows - i, first, pairs, a + i * lda, lda, b, c + i * ldc, ldc, is_sum);
}
#endif

// C = A · B, or C += A · B. C's columns are computed up to a whole panel; with AMX its rows, too, and A's rows and
// depth are read up to whole tiles. In A an odd last column is followed by a finite number.
inline void multiply_bf16(int64_t rows, int64_t columns, int64_t depth, const BFloat16* a, int64_t lda,
                          const AmxPanels& b, float* c, int64_t ldc, bool is_sum) {
#if OVERTONE_USES_AMX
  multiply_tiles(tiles_of(rows, kTileSize), tiles_of(columns, kTileSize), tiles_of(depth, kTileDepth), a, lda, b, c,
                 ldc, is_sum);
#else
  const int64_t pairs = (depth + 1) / 2;
  const int vectors = vectors_of<float>(padded_to(columns, kTileSize));
  for (int first = 0; first < vectors;) {
    const int width = next_tile_width(vectors - first);
    switch (width) {
      case 1:
        multiply_pair_columns<1>(rows, first, pairs, a, lda, b, c, ldc, is_sum);
        break;
      case 2:
        multiply_pair_columns<2>(rows, first, pairs, a, lda, b, c, ldc, is_sum);
        break;
#if OVERTONE_VECTOR_BYTES == 64
      case 3:
        multiply_pair_columns<3>(rows, first, pairs, a, lda, b, c, ldc, is_sum);
        break;
      case 4:
        multiply_pair_columns<4>(rows, first, pairs, a, lda, b, c, ldc, is_sum);
        break;
#endif
    }
    first += width;
  }
#endif
}

// Rows of a matrix as A: where they lie, or packed into `scratch`, whose rows end in zeros.
struct Bf16Operand {
  const BFloat16* data;
  int64_t ld;

  // Elements of scratch.
  static int64_t size(int64_t rows, int64_t width) { return padded_to(rows, kTileSize) * stride(width); }

  Bf16Operand(const StridedMatrix& source, int64_t rows, int64_t width, BFloat16* scratch) {
    const bool is_whole = rows % kWholeRows == 0 && width % kWholeDepth == 0;
    if (source.type == Dtype::bfloat16 && source.column_stride == 1 && is_whole) {
      data = static_cast<const BFloat16*>(source.data);
      ld = source.row_stride;
    } else {
      ld = stride(width);
      pack_tile_rows(source, rows, width, scratch, ld);
      data = scratch;
    }
  }

 private:
  static int64_t stride(int64_t width) { return padded_stride<BFloat16>(padded_to(width, kTileDepth)); }
};

}  // namespace overtone::OVERTONE_ISA
