// From tensors of any type and strides to the operands of products, and back.
#pragma once

#include "cpu/gemm/microkernel.h"
#include "cpu/gemm/params.h"
#include "cpu/gemm/prefetch.h"
#include "cpu/simd/scratch.h"
#include "cpu/simd/transpose.h"
#include "cpu/simd/vector.h"

namespace overtone::OVERTONE_ISA {

// Calls f with a value of the C++ type; everything but packing and rounding is compiled for A alone.
template <class A, class F>
OVERTONE_INLINE void with_type(Dtype type, const F& f) {
  if constexpr (std::is_same_v<A, double>) {
    f(double{});
  } else if (type == Dtype::float32) {
    f(float{});
  } else if (type == Dtype::bfloat16) {
    f(BFloat16{});
  } else {
    f(Half{});
  }
}

// rows × width, widened and scaled, rows `ld` apart; columns up to `ld` are zero.
template <class A>
void pack_rows(const StridedMatrix& source, int64_t rows, int64_t width, A scale, A* out, int64_t ld) {
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
void pack_columns(const StridedMatrix& source, int64_t rows, int64_t width, A scale, A* out, int64_t ld) {
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
void pack_column_panels(const StridedMatrix& source, int64_t rows, int64_t width, A scale, A* out) {
  for (int64_t row = 0; row < rows;) {
    const int64_t columns = next_tile_width(vectors_of<A>(rows - row)) * kLanes<A>;
    pack_columns(source.from(row, 0), std::min(columns, rows - row), width, scale, out + row * width, columns);
    row += columns;
  }
}

// Rows [row, row + rows) and columns [column, column + columns) of the source, rows `ld` apart; columns up to `ld` are
// zero. Of a transposed matrix what is read together lies together, too.
template <class A>
void pack_block(const StridedMatrix& source, int64_t row, int64_t column, int64_t rows, int64_t columns, A* out,
                int64_t ld) {
  const StridedMatrix block = source.from(row, column);
  if (source.row_stride == 1 && source.column_stride != 1) {
    pack_columns(block.transposed(), columns, rows, A{1}, out, ld);
  } else {
    pack_rows(block, rows, columns, A{1}, out, ld);
  }
}

// One panel of gemm_by_panels(), `vectors` wide, from `column` on: row after row; zeros fill the last vectors up.
template <class A>
void pack_panel(const PanelPacking& call, int64_t column, int vectors) {
  const int64_t ld = vectors * kLanes<A>;
  const int64_t width = std::min(ld, call.columns - column);
  A* out = static_cast<A*>(call.panels) + column * call.depth;
  pack_block(call.source, 0, column, call.depth, width, out, ld);
}

// The first vector of a panel. All panels but the first few have the width of the one before; counting them is cheap
// beside packing one.
inline int panel_begin(int64_t panel, int vectors) {
  int first = 0;
  for (int64_t i = 0; i < panel; ++i) {
    first += next_tile_width(vectors - first);
  }
  return first;
}

template <class A>
void pack_panels_of(const PanelPacking& call, WorkQueue& queue) {
  const int vectors = vectors_of<A>(call.columns);
  for (int64_t panel; (panel = queue.pop()) >= 0;) {
    const int first = panel_begin(panel, vectors);
    pack_panel<A>(call, first * kLanes<A>, next_tile_width(vectors - first));
  }
}

inline void pack_panels(const PanelPacking& call, WorkQueue& queue) {
  call.source.type == Dtype::float64 ? pack_panels_of<double>(call, queue) : pack_panels_of<float>(call, queue);
}

inline int panel_vectors(const PanelPacking& call) {
  return call.source.type == Dtype::float64 ? vectors_of<double>(call.columns) : vectors_of<float>(call.columns);
}

inline int64_t panel_elements(const PanelPacking& call) {
  const int lanes = call.source.type == Dtype::float64 ? kLanes<double> : kLanes<float>;
  return call.depth * panel_vectors(call) * lanes;
}

inline int64_t panel_count(const PanelPacking& call) {
  int64_t count = 0;
  for (int left = panel_vectors(call); left > 0; left -= next_tile_width(left)) {
    ++count;
  }
  return count;
}

inline constexpr PackingKernels panel_packing = {&panel_elements, &panel_count, &pack_panels};

// Rows of scratch, scaled and rounded, into a tensor.
template <class A>
void unpack_rows(const A* source, int64_t ld, int64_t rows, int64_t width, A scale, const StridedMatrix& out) {
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

// So few rows never miss the TLB, however far apart they are.
constexpr int64_t kNearRows = 120;

// Rows as products read them: as they lie in memory where that is as good, otherwise packed into `scratch`. Many rows
// far apart are not: read again and again, they would miss the TLB.
template <class A>
struct GemmOperand {
  const A* data;
  int64_t ld;

  GemmOperand(const StridedMatrix& source, int64_t rows, int64_t width, A* scratch) {
    const bool is_near = rows <= kNearRows || source.row_stride == width;
    if (source.type == kDtype<A> && source.column_stride == 1 && width % kLanes<A> == 0 && is_near) {
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
