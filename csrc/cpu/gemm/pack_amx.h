// From tensors of any type and strides to the operands of products of tiles.
#pragma once

#include "cpu/gemm/pack.h"
#include "cpu/simd/amx.h"
#include "cpu/simd/transpose.h"

namespace overtone::OVERTONE_ISA {

// A's operand: rows × width as bfloat16, rows `ld` apart; columns up to `ld` are zero.
inline void pack_tile_rows(const StridedMatrix& source, int64_t rows, int64_t width, BFloat16* out, int64_t ld) {
  constexpr int kSize = kLanes<float>;
  with_type<float>(source.type, [=, stride = source.column_stride](auto element) {
    using T = decltype(element);
    for (int64_t row = 0; row < rows; ++row) {
      const T* from = source.at<T>(row, 0);
      BFloat16* to = out + row * ld;
      int64_t column = 0;
      if (std::is_same_v<T, BFloat16> && stride == 1) {
        std::memcpy(static_cast<void*>(to), static_cast<const void*>(from), width * sizeof(BFloat16));
        std::memset(static_cast<void*>(to + width), 0, (ld - width) * sizeof(BFloat16));
        continue;
      }
      for (; column < ld; column += kSize) {
        const int count = static_cast<int>(std::clamp<int64_t>(width - column, 0, kSize));
        store_full(count == 0 ? Vector<float>{} : load(from + column * stride, stride, count), to + column);
      }
    }
  });
}

// A's operand, transposed: columns of the source become rows, as many as fill whole tiles, `ld` apart; zeros fill up
// their ends up to whole tiles.
inline void pack_tile_columns(const StridedMatrix& source, int64_t rows, int64_t width, BFloat16* out, int64_t ld) {
  constexpr int kSize = kLanes<float>;
  with_type<float>(source.type, [=](auto element) {
    using T = decltype(element);
    for (int64_t row = 0; row < padded_to(rows, kTileDepth); row += kSize) {
      const int square_rows = static_cast<int>(std::clamp<int64_t>(rows - row, 0, kSize));
      for (int64_t column = 0; column < padded_to(width, kTileSize); column += kSize) {
        const int columns = static_cast<int>(std::clamp<int64_t>(width - column, 0, kSize));
        Vector<float> square[kSize];
        load_transposed(static_cast<const T*>(source.at<T>(row, column)), source.row_stride, source.column_stride,
                        square_rows, columns, square);
        OVERTONE_UNROLL
        for (int i = 0; i < kSize; ++i) {
          store_full(square[i], out + (column + i) * ld + row);
        }
      }
    }
  });
}

// kLanes rows of a matrix from (row, column) on, a vector each; zeros outside of rows × columns.
template <class T>
OVERTONE_INLINE void load_rows(const StridedMatrix& source, int64_t row, int64_t column, int64_t rows, int64_t columns,
                               Vector<float> (&block)[kLanes<float>]) {
  constexpr int kSize = kLanes<float>;
  const int block_rows = static_cast<int>(std::clamp<int64_t>(rows - row, 0, kSize));
  const int block_columns = static_cast<int>(std::clamp<int64_t>(columns - column, 0, kSize));
  const T* corner = source.at<T>(row, column);
  if (source.row_stride == 1 && source.column_stride != 1) {
    load_transposed(corner, source.column_stride, 1, block_columns, block_rows, block);
    return;
  }
  for (int i = 0; i < kSize; ++i) {
    block[i] = i < block_rows && block_columns > 0
                   ? load(corner + i * source.row_stride, source.column_stride, block_columns)
                   : Vector<float>{};
  }
}

// Two vectors as the rows of a pair: the first one's numbers in the low halves.
OVERTONE_INLINE void store_pair(Vector<float> first, Vector<float> second, BFloat16* out) {
  const Words pair = bfloat16_words(first) | bfloat16_words(second) << 16;
  std::memcpy(static_cast<void*>(out), &pair, sizeof pair);
}

// B's operand from a matrix of `depth` rows: column tiles, `depth_tiles` tiles each, of which the first `written` are
// filled.
inline void pack_row_pairs(const StridedMatrix& source, int64_t depth, int64_t columns, BFloat16* out,
                           int64_t depth_tiles, int64_t written) {
  constexpr int kSize = kLanes<float>;
  with_type<float>(source.type, [=](auto element) {
    using T = decltype(element);
    for (int64_t column = 0; column < padded_to(columns, kTileSize); column += kSize) {
      BFloat16* tiles = out + column / kTileSize * depth_tiles * kTileElements + column % kTileSize * 2;
      for (int64_t k = 0; k < written * kTileDepth; k += kSize) {
        Vector<float> block[kSize];
        load_rows<T>(source, k, column, depth, columns, block);
        BFloat16* tile = tiles + k / kTileDepth * kTileElements + k % kTileDepth * kTileSize;
        OVERTONE_UNROLL
        for (int i = 0; i < kSize; i += 2) {
          store_pair(block[i], block[i + 1], tile + i * kTileSize);
        }
      }
    }
  });
}

inline void pack_row_pairs(const StridedMatrix& source, int64_t depth, int64_t columns, BFloat16* out,
                           int64_t depth_tiles) {
  pack_row_pairs(source, depth, columns, out, depth_tiles, depth_tiles);
}

// The numbers (row, 2·word) and (row, 2·word + 1) of kLanes words, as they lie in a pair; zeros outside of `width`.
template <class T>
OVERTONE_INLINE Vector<float> load_words(const StridedMatrix& source, int64_t row, int64_t word, int64_t width) {
  constexpr int kSize = kLanes<float>;
  const T* p = source.at<T>(row, 2 * word);
  Vector<float> words{};
  if (std::is_same_v<T, BFloat16> && source.column_stride == 1 && 2 * (word + kSize) <= width) {
    std::memcpy(&words, static_cast<const void*>(p), sizeof words);
    return words;
  }
  BFloat16 numbers[2 * kSize] = {};
  for (int i = 0; i < std::min<int64_t>(2 * kSize, width - 2 * word); ++i) {
    narrow(widen(p[i * source.column_stride]), numbers + i);
  }
  std::memcpy(&words, static_cast<const void*>(numbers), sizeof words);
  return words;
}

// B's operand from a matrix whose rows are B's columns: column tiles, tiles_of(width, kTileDepth) tiles each.
inline void pack_column_pairs(const StridedMatrix& source, int64_t rows, int64_t width, BFloat16* out) {
  constexpr int kSize = kLanes<float>;
  const int64_t depth_tiles = tiles_of(width, kTileDepth);
  with_type<float>(source.type, [=](auto element) {
    using T = decltype(element);
    for (int64_t row = 0; row < padded_to(rows, kTileSize); row += kSize) {
      for (int64_t word = 0; word < depth_tiles * kTileSize; word += kSize) {
        Vector<float> square[kSize];
        OVERTONE_UNROLL
        for (int i = 0; i < kSize; ++i) {
          square[i] = row + i < rows ? load_words<T>(source, row + i, word, width) : Vector<float>{};
        }
        transpose_square<float>(square);
        BFloat16* tile = out + (row / kTileSize * depth_tiles + word / kTileSize) * kTileElements +
                         word % kTileSize * kTileDepth + row % kTileSize * 2;
        OVERTONE_UNROLL
        for (int i = 0; i < kSize; ++i) {
          std::memcpy(static_cast<void*>(tile + i * kTileDepth), &square[i], sizeof square[i]);
        }
      }
    }
  });
}

// The packing of gemm/params.h; a panel is a column of tiles.
inline int64_t amx_panel_count(const PanelPacking& call) { return tiles_of(call.columns, kTileSize); }

inline int64_t amx_panel_elements(const PanelPacking& call) {  // two bf16 numbers in each
  return tiles_of(call.depth, kTileDepth) * amx_panel_count(call) * kTileElements / 2;
}

inline void pack_amx_panels(const PanelPacking& call, WorkQueue& queue) {
  const int64_t depth_tiles = tiles_of(call.depth, kTileDepth);
  for (int64_t panel; (panel = queue.pop()) >= 0;) {
    const int64_t column = panel * kTileSize;
    pack_row_pairs(call.source.from(0, column), call.depth, std::min(kTileSize, call.columns - column),
                   static_cast<BFloat16*>(call.panels) + panel * depth_tiles * kTileElements, depth_tiles);
  }
}

inline constexpr PackingKernels amx_panel_packing = {&amx_panel_elements, &amx_panel_count, &pack_amx_panels};

}  // namespace overtone::OVERTONE_ISA
