// Which instruction set the CPU kernels use: detected once, capped by OVERTONE_CPU_ISA or by set_isa().
#pragma once

#include <string>
#include <vector>

namespace overtone {

// amx is avx512 and products of bfloat16 on tiles. amx_emulated, for tests, is baseline with those tiles in plain C++:
// every machine has it, and only its name chooses it.
enum class Isa : int { baseline = 0, avx2 = 1, avx512 = 2, amx = 3, amx_emulated = 4 };

constexpr int kVectorLevels = 3;  // those that differ in their vectors

const char* isa_name(Isa isa);

// Every level this CPU and operating system can run, lowest first; not the emulated one.
std::vector<std::string> available_isas();

// The level in use: the best available one that does not exceed the cap.
Isa current_isa();

// The level of its vectors.
Isa vector_isa();

// Caps the level for this process. Throws if the name is unknown or the machine lacks the level.
void set_isa(const std::string& name);

// Picks the entry of a per-level table {baseline, avx2, avx512}.
template <class Kernels>
const Kernels& for_current_isa(const Kernels* const (&table)[kVectorLevels]) {
  return *table[static_cast<int>(vector_isa())];
}

// The kernel that ran last for this thread, as "op/level". Each level's translation unit names itself, so a
// test that forces a level can assert that this level really ran.
void note_kernel(const char* op, const char* level);
std::string last_kernel();

}  // namespace overtone
