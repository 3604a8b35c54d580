// The instruction sets the CPU kernels are compiled for, and which of them is in use: detected once, capped by
// OVERTONE_CPU_ISA or by set_isa(). A new one is a name and a row here, its detection in isa.cpp, and its kernels in
// setup.py's KERNELS.
#pragma once

#include <string>
#include <vector>

// Every instruction set, lowest first; the emulated ones, which only their names choose, last.
#define OVERTONE_ISAS(X, ...)          \
  X(baseline, __VA_ARGS__)             \
  X(avx2, __VA_ARGS__)                 \
  X(avx512, __VA_ARGS__)               \
  X(avx512_bf16, __VA_ARGS__)          \
  X(amx, __VA_ARGS__)                  \
  X(avx512_bf16_emulated, __VA_ARGS__) \
  X(amx_emulated, __VA_ARGS__)

// Their rows: whose vectors it has, bytes of a vector, has AVX512-BF16, multiplies bf16 on AMX's tiles, what the
// compiler is told.
#define OVERTONE_ISA_ROW_baseline (baseline, 16, 0, 0, "")
#define OVERTONE_ISA_ROW_avx2 (avx2, 32, 0, 0, "avx2,fma,f16c")
// F, BW, DQ, VL: every server since Skylake.
#define OVERTONE_ISA_ROW_avx512 (avx512, 64, 0, 0, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
// Products of bf16 by vdpbf16ps (cpu/gemm/bf16.h): Cooper Lake, Zen 4.
#define OVERTONE_ISA_ROW_avx512_bf16 (avx512, 64, 1, 0, "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
// Products of bf16 on tiles (cpu/simd/amx.h): Sapphire Rapids. Every machine with AMX has AVX512-BF16 as well.
#define OVERTONE_ISA_ROW_amx (avx512, 64, 1, 1, "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
// The two above in plain C++: slow, the same on every machine, for tests of everything around their instructions.
#define OVERTONE_ISA_ROW_avx512_bf16_emulated (baseline, 16, 0, 0, "")
#define OVERTONE_ISA_ROW_amx_emulated (baseline, 16, 0, 1, "")

#define OVERTONE_ISA_VECTORS(vectors, bytes, avx512bf16, uses_amx, target) vectors
#define OVERTONE_ISA_VECTOR_BYTES(vectors, bytes, avx512bf16, uses_amx, target) bytes
#define OVERTONE_ISA_HAS_AVX512BF16(vectors, bytes, avx512bf16, uses_amx, target) avx512bf16
#define OVERTONE_ISA_USES_AMX(vectors, bytes, avx512bf16, uses_amx, target) uses_amx
#define OVERTONE_ISA_TARGET(vectors, bytes, avx512bf16, uses_amx, target) target

// OVERTONE_ISA_COLUMN(VECTORS, amx) is avx512.
#define OVERTONE_ISA_COLUMN(column, isa) OVERTONE_ISA_COLUMN_(OVERTONE_ISA_##column, isa)
#define OVERTONE_ISA_COLUMN_(column, isa) OVERTONE_ISA_PICK(column, OVERTONE_ISA_ROW_##isa)
#define OVERTONE_ISA_PICK(column, row) column row

namespace overtone {

#define OVERTONE_ENUMERATOR(isa, ...) isa,
enum class Isa : int { OVERTONE_ISAS(OVERTONE_ENUMERATOR) };
#undef OVERTONE_ENUMERATOR

constexpr int kIsas = static_cast<int>(Isa::amx_emulated) + 1;
constexpr int kRealIsas = static_cast<int>(Isa::amx) + 1;  // all but the emulated ones

const char* isa_name(Isa isa);

// Every instruction set this CPU and operating system can run, lowest first; not the emulated ones.
std::vector<std::string> available_isas();

// The one in use: the best available one that does not exceed the cap.
Isa current_isa();

// The one of its vectors: what all kernels but those of bf16 use.
Isa vector_isa();

// Caps the instruction set for this process. Throws if the name is unknown or the machine lacks it.
void set_isa(const std::string& name);

// The kernel that ran last for this thread, as "op/isa". The kernels of each instruction set name themselves, so a
// test that forces one can assert that it really ran.
void record_kernel(const char* op, const char* isa);
std::string last_kernel();

}  // namespace overtone
