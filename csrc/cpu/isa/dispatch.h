// An op's kernels for every instruction set, and the choice between them. The tables are constants: static constructors
// in the files of an instruction set would run when the extension is loaded, also on machines that lack it.
#pragma once

#include "cpu/isa/isa.h"

namespace overtone {

// Null where setup.py's KERNELS does not list the instruction set.
template <class Kernels>
struct KernelTable {
  const Kernels* by_isa[kIsas];

  // The kernels of the instruction set in use. One that adds nothing but products of bf16 has kernels for bf16 alone;
  // for other types, and for ops without such kernels, it is the one whose vectors it has.
  const Kernels& find(bool is_bf16 = false) const {
    const Kernels* own = by_isa[static_cast<int>(current_isa())];
    return is_bf16 && own != nullptr ? *own : *by_isa[static_cast<int>(vector_isa())];
  }

  // The same, about to run for `op`.
  const Kernels& get(const char* op, bool is_bf16 = false) const {
    const Kernels& kernels = find(is_bf16);
    record_kernel(op, kernels.isa);
    return kernels;
  }
};

}  // namespace overtone

// In an op's params.h, in namespace overtone: declares `name` of every instruction set and their table, name_table.
// Weak, so that what is not compiled is null.
#define OVERTONE_KERNELS(Type, name)                   \
  OVERTONE_ISAS(OVERTONE_DECLARE_KERNELS_, Type, name) \
  inline constexpr KernelTable<Type> name##_table = {{OVERTONE_ISAS(OVERTONE_ADDRESS_, name)}}
#define OVERTONE_DECLARE_KERNELS_(isa, Type, name)                    \
  namespace isa {                                                     \
  extern const Type name __attribute__((weak, visibility("hidden"))); \
  }
#define OVERTONE_ADDRESS_(isa, name) &isa::name,
