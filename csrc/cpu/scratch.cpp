#include <new>
#include <string>

#include "cpu/memory.h"

namespace overtone {

void* allocate_scratch(size_t bytes) {
  void* memory = ::operator new(bytes, std::align_val_t{64}, std::nothrow);
  if (memory == nullptr) {
    throw OutOfMemory(std::to_string(bytes) + " bytes of working memory for each thread");
  }
  return memory;
}

}  // namespace overtone
