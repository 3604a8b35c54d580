#include "cpu/memory.h"

#include "cpu/errors.h"

namespace overtone {
namespace {

constexpr std::align_val_t kCacheLine{64};

}  // namespace

void* allocate_aligned(int64_t count, int64_t size) {
  const int64_t bytes = count_or_fail(count, size);
  void* memory = ::operator new(static_cast<size_t>(bytes), kCacheLine, std::nothrow);
  if (memory == nullptr) {
    throw OutOfMemory(bytes);
  }
  return memory;
}

void free_aligned(void* memory) { ::operator delete(memory, kCacheLine); }

}  // namespace overtone
