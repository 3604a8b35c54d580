// The element types the CPU kernels read and write. No torch header: kernels of every ISA level include it.
#pragma once

namespace overtone {

enum class ElementType { float32, float64, bfloat16, float16 };

}  // namespace overtone
