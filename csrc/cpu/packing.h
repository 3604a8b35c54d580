// From tensors of any type and strides to the operands of products, and back.
#pragma once

#include "cpu/element_type.h"
#include "cpu/gemm.h"
#include "cpu/simd.h"

namespace overtone::OVERTONE_LEVEL {

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

// rows × width, widened, rows `ld` apart; columns up to `ld` are zero.
template <class A>
void pack_rows(const MatrixRows& source, int64_t rows, int64_t width, A* out, int64_t ld) {
  with_type<A>(source.type, [&](auto element) {
    using T = decltype(element);
    const int64_t whole = source.column_stride == 1 ? width / kLanes<A> * kLanes<A> : 0;
    for (int64_t i = 0; i < rows; ++i) {
      int64_t j = 0;
      for (; j < whole; j += kLanes<A>) {
        store_full(load_full(source.at<T>(i, j)), out + i * ld + j);
      }
      for (; j < ld; j += kLanes<A>) {
        const int lanes = static_cast<int>(std::clamp<int64_t>(width - j, 0, kLanes<A>));
        store_full(lanes == 0 ? Vector<A>{} : load(source.at<T>(i, j), source.column_stride, lanes), out + i * ld + j);
      }
    }
  });
}

// A square of `rows` × `columns` elements of a matrix, transposed; zeros fill it up.
template <class T>
OVERTONE_INLINE void load_transposed(const MatrixRows& source, int64_t row, int64_t column, int rows, int columns,
                                     Vector<Accumulator<T>> (&square)[kLanes<Accumulator<T>>]) {
  using A = Accumulator<T>;
  constexpr int kSize = kLanes<A>;
  if (rows == kSize && columns == kSize && source.column_stride == 1) {
    OVERTONE_UNROLL
    for (int i = 0; i < kSize; ++i) {
      square[i] = load_full(source.at<T>(row + i, column));
    }
  } else {
    A elements[kSize][kSize] = {};
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < columns; ++j) {
        elements[i][j] = widen(*source.at<T>(row + i, column + j));
      }
    }
    std::memcpy(square, elements, sizeof elements);
  }
  transpose_square<A>(square);
}

// The transpose: width × rows, rows `ld` apart; columns from `rows` up to `ld` are zero.
template <class A>
void pack_columns(const MatrixRows& source, int64_t rows, int64_t width, A* out, int64_t ld) {
  constexpr int kSize = kLanes<A>;
  with_type<A>(source.type, [&](auto element) {
    for (int64_t i = 0; i < ld; i += kSize) {
      for (int64_t j = 0; j < width; j += kSize) {
        const int square_rows = static_cast<int>(std::clamp<int64_t>(rows - i, 0, kSize));
        const int columns = static_cast<int>(std::min<int64_t>(kSize, width - j));
        Vector<A> square[kSize];
        load_transposed<decltype(element)>(source, i, j, square_rows, columns, square);
        OVERTONE_UNROLL
        for (int column = 0; column < kSize; ++column) {
          if (column < columns) {
            store_full(square[column], out + (j + column) * ld + i);
          }
        }
      }
    }
  });
}

// Rows of scratch, scaled and rounded, into a tensor.
template <class A>
void unpack_rows(const A* source, int64_t ld, int64_t rows, int64_t width, A scale, const MatrixRows& out) {
  with_type<A>(out.type, [&](auto element) {
    using T = decltype(element);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < width; j += kLanes<A>) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes<A>, width - j));
        const Vector<A> v = load_full(source + i * ld + j) * scale;
        if (out.column_stride == 1) {
          store(v, out.at<T>(i, j), lanes);
        } else {
          A values[kLanes<A>];
          store_full(v, values);
          for (int lane = 0; lane < lanes; ++lane) {
            narrow(values[lane], out.at<T>(i, j + lane));
          }
        }
      }
    }
  });
}

// So few rows never miss the TLB, however far apart they are.
constexpr int64_t kNearRows = 96;

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
      pack_rows(source, rows, width, scratch, ld);
      data = scratch;
    }
  }
};

}  // namespace overtone::OVERTONE_LEVEL
