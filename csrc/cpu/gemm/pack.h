// From tensors of any type and strides to the operands of products, and back.
#pragma once

#include "cpu/dtype.h"
#include "cpu/gemm/microkernel.h"
#include "cpu/simd/scratch.h"
#include "cpu/simd/vector.h"

namespace overtone::OVERTONE_ISA {

// Rows of a matrix in memory: any element type, any strides.
struct MatrixRows {
  ElementType type;
  void* data;
  int64_t row_stride;
  int64_t column_stride;

  template <class T>
  T* at(int64_t row, int64_t column) const {
    return static_cast<T*>(data) + row * row_stride + column * column_stride;
  }
};

inline int64_t bytes_of(ElementType type) {
  return type == ElementType::float64 ? 8 : type == ElementType::float32 ? 4 : 2;
}

// Rows of a contiguous buffer of the statistics' type.
template <class A>
MatrixRows buffer_rows(const void* data, int64_t offset, int64_t row_stride) {
  constexpr ElementType type = std::is_same_v<A, double> ? ElementType::float64 : ElementType::float32;
  return {type, const_cast<A*>(static_cast<const A*>(data)) + offset, row_stride, 1};
}

// Calls f with a value of the C++ type; everything but packing and rounding is compiled for A alone.
template <class A, class F>
OVERTONE_INLINE void with_type(ElementType type, const F& f) {
  if constexpr (std::is_same_v<A, double>) {
    f(double{});
  } else if (type == ElementType::float32) {
    f(float{});
  } else if (type == ElementType::bfloat16) {
    f(BFloat16{});
  } else {
    f(Half{});
  }
}

// rows × width, widened and scaled, rows `ld` apart; columns up to `ld` are zero.
template <class A>
void pack_rows(const MatrixRows& source, int64_t rows, int64_t width, A scale, A* out, int64_t ld) {
  with_type<A>(source.type, [=, stride = source.column_stride](auto element) {
    using T = decltype(element);
    const int64_t whole = stride == 1 ? width / kLanes<A> * kLanes<A> : 0;
    for (int64_t i = 0; i < rows; ++i) {
      const T* row = source.at<T>(i, 0);
      A* out_row = out + i * ld;
      int64_t j = 0;
      for (; j < whole; j += kLanes<A>) {
        store_full(load_full(row + j) * scale, out_row + j);
      }
      for (; j < ld; j += kLanes<A>) {
        const int lanes = static_cast<int>(std::clamp<int64_t>(width - j, 0, kLanes<A>));
        const Vector<A> v = lanes == 0 ? Vector<A>{} : load(row + j * stride, stride, lanes);
        store_full(v * scale, out_row + j);
      }
    }
  });
}

// A square of `rows` × `columns` elements, transposed; zeros fill it up.
template <class T>
OVERTONE_INLINE void load_transposed(const T* corner, int64_t row_stride, int64_t column_stride, int rows, int columns,
                                     Vector<Accumulator<T>> (&square)[kLanes<Accumulator<T>>]) {
  using A = Accumulator<T>;
  constexpr int kSize = kLanes<A>;
  if (rows == kSize && columns == kSize && column_stride == 1) {
    OVERTONE_UNROLL
    for (int i = 0; i < kSize; ++i) {
      square[i] = load_full(corner + i * row_stride);
    }
  } else if (columns == kSize && column_stride == 1) {
    OVERTONE_UNROLL
    for (int i = 0; i < kSize; ++i) {
      square[i] = i < rows ? load_full(corner + i * row_stride) : Vector<A>{};
    }
  } else {
    A elements[kSize][kSize] = {};
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < columns; ++j) {
        elements[i][j] = widen(corner[i * row_stride + j * column_stride]);
      }
    }
    std::memcpy(square, elements, sizeof elements);
  }
  transpose_square<A>(square);
}

// The transpose, scaled: width × rows, rows `ld` apart; columns from `rows` up to `ld` are zero.
template <class A>
void pack_columns(const MatrixRows& source, int64_t rows, int64_t width, A scale, A* out, int64_t ld) {
  constexpr int kSize = kLanes<A>;
  with_type<A>(source.type, [=](auto element) {
    using T = decltype(element);
    for (int64_t i = 0; i < ld; i += kSize) {
      const int square_rows = static_cast<int>(std::clamp<int64_t>(rows - i, 0, kSize));
      for (int64_t j = 0; j < width; j += kSize) {
        const int columns = static_cast<int>(std::min<int64_t>(kSize, width - j));
        Vector<A> square[kSize];
        load_transposed(static_cast<const T*>(source.at<T>(i, j)), source.row_stride, source.column_stride, square_rows,
                        columns, square);
        A* out_square = out + j * ld + i;
        if (columns == kSize) {
          OVERTONE_UNROLL
          for (int column = 0; column < kSize; ++column) {
            store_full(square[column] * scale, out_square + column * ld);
          }
        } else {
          for (int column = 0; column < columns; ++column) {
            store_full(square[column] * scale, out_square + column * ld);
          }
        }
      }
    }
  });
}

// The transpose as gemm_by_panels() reads it: rows of the source become columns, in panels.
template <class A>
void pack_column_panels(const MatrixRows& source, int64_t rows, int64_t width, A scale, A* out) {
  for (int64_t row = 0; row < rows;) {
    const int panel = next_tile_width(static_cast<int>((rows - row + kLanes<A> - 1) / kLanes<A>));
    MatrixRows part = source;
    part.data = static_cast<char*>(source.data) + row * source.row_stride * bytes_of(source.type);
    const int64_t columns = panel * kLanes<A>;
    pack_columns(part, std::min(columns, rows - row), width, scale, out + row * width, columns);
    row += columns;
  }
}

// One panel of gemm_by_panels(): columns [column, column + width) of a depth × columns matrix, row after row, rows and
// columns scaled where a scale is given; zeros fill the last vectors up.
template <class A>
void pack_panel(const MatrixRows& source, int64_t depth, int64_t column, int64_t width, const A* row_scale,
                const A* column_scale, int vectors, A* out) {
  const int64_t ld = vectors * kLanes<A>;
  if (source.row_stride == 1 && source.column_stride != 1) {
    // A transposed matrix: its columns are rows in memory, and what is read together lies together.
    const MatrixRows across{source.type, source.data, source.column_stride, 1};
    MatrixRows first = across;
    first.data = static_cast<char*>(source.data) + column * source.column_stride * bytes_of(source.type);
    pack_columns(first, width, depth, A{1}, out, ld);
  } else {
    MatrixRows first = source;
    first.data = static_cast<char*>(source.data) + column * source.column_stride * bytes_of(source.type);
    pack_rows(first, depth, width, A{1}, out, ld);
  }
  if (row_scale == nullptr && column_scale == nullptr) {
    return;
  }
  for (int v = 0; v < vectors; ++v) {
    const int lanes = static_cast<int>(std::clamp<int64_t>(width - v * kLanes<A>, 0, kLanes<A>));
    const Vector<A> columns =
        column_scale == nullptr || lanes == 0 ? broadcast(A{1}) : load(column_scale + column + v * kLanes<A>, 1, lanes);
    for (int64_t k = 0; k < depth; ++k) {
      A* p = out + k * ld + v * kLanes<A>;
      store_full(load_full(p) * columns * (row_scale == nullptr ? A{1} : row_scale[k]), p);
    }
  }
}

// Rows of scratch, scaled and rounded, into a tensor.
template <class A>
void unpack_rows(const A* source, int64_t ld, int64_t rows, int64_t width, A scale, const MatrixRows& out) {
  with_type<A>(out.type, [=, stride = out.column_stride](auto element) {
    using T = decltype(element);
    for (int64_t i = 0; i < rows; ++i) {
      T* row = out.at<T>(i, 0);
      for (int64_t j = 0; j < width; j += kLanes<A>) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes<A>, width - j));
        const Vector<A> v = load_full(source + i * ld + j) * scale;
        if (stride == 1) {
          store(v, row + j, lanes);
        } else {
          A values[kLanes<A>];
          store_full(v, values);
          for (int lane = 0; lane < lanes; ++lane) {
            narrow(values[lane], row + (j + lane) * stride);
          }
        }
      }
    }
  });
}

// Rows that a thread reads soon: while it computes, it asks for them one after another, so that they are in its
// second-level cache by then. Strided rows of heads are nothing that the hardware would foresee.
class ComingRows {
 public:
  void clear() {
    parts_ = 0;
    next_ = 0;
  }

  void add(const MatrixRows& rows, int64_t count, int64_t width) {
    if (rows.column_stride == 1) {
      const int64_t size = bytes_of(rows.type);
      part_[parts_++] = {static_cast<const char*>(rows.data), rows.row_stride * size, width * size, count};
    }
  }

  // The next row of every part.
  OVERTONE_INLINE void fetch() {
    for (int i = 0; i < parts_; ++i) {
      const Part& part = part_[i];
      if (next_ < part.rows) {
        const char* row = part.data + next_ * part.stride;
        for (int64_t byte = 0; byte < part.width; byte += kLine) {
          __builtin_prefetch(row + byte, 0, 2);
        }
      }
    }
    ++next_;
  }

 private:
  static constexpr int kMostParts = 5;
  static constexpr int64_t kLine = 64;

  struct Part {
    const char* data;
    int64_t stride;  // in bytes, as the width
    int64_t width;
    int64_t rows;
  };

  Part part_[kMostParts];
  int parts_ = 0;
  int64_t next_ = 0;
};

// So few rows never miss the TLB, however far apart they are.
constexpr int64_t kNearRows = 120;

// Rows as products read them: as they lie in memory where that is as good, otherwise packed into `scratch`. Many rows
// far apart are not: read again and again, they would miss the TLB.
template <class A>
struct ProductRows {
  const A* data;
  int64_t ld;

  ProductRows(const MatrixRows& source, int64_t rows, int64_t width, A* scratch) {
    constexpr ElementType kType = std::is_same_v<A, double> ? ElementType::float64 : ElementType::float32;
    const bool is_near = rows <= kNearRows || source.row_stride == width;
    if (source.type == kType && source.column_stride == 1 && width % kLanes<A> == 0 && is_near) {
      data = static_cast<const A*>(source.data);
      ld = source.row_stride;
    } else {
      ld = padded_to(width, kLanes<A>);
      pack_rows(source, rows, width, A{1}, scratch, ld);
      data = scratch;
    }
  }
};

}  // namespace overtone::OVERTONE_ISA
