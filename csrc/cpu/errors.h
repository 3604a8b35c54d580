// How the ops fail: one line that names the op, what it got and what it wanted.
#pragma once

#include <cstdint>
#include <limits>
#include <new>
#include <sstream>
#include <stdexcept>

namespace overtone {

template <class... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream text;
  text << op << ": ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

// Thrown far below the op, which adds its name (registration.h).
struct OutOfMemory : std::bad_alloc {
  int64_t bytes;
  explicit OutOfMemory(int64_t bytes) : bytes(bytes) {}
};

// How many bytes or elements; more than can be counted are more than there is memory.
inline int64_t count_or_fail(int64_t a, int64_t b) {
  int64_t count = 0;
  if (__builtin_mul_overflow(a, b, &count) || count < 0) {
    throw OutOfMemory(std::numeric_limits<int64_t>::max());
  }
  return count;
}

}  // namespace overtone
