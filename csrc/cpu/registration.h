// Registers a CPU implementation under its function's name; when memory runs out, the error names the op and the bytes.
#pragma once

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <new>

#include "cpu/errors.h"

namespace overtone {

// A string as a template argument.
template <size_t length>
struct OpName {
  char text[length]{};
  constexpr OpName(const char (&name)[length]) { std::copy_n(name, length, text); }
};

template <OpName name, auto function>
struct Guarded;

template <OpName name, class Result, class... Arguments, Result (*function)(Arguments...)>
struct Guarded<name, function> {
  static Result call(Arguments... arguments) {
    try {
      return function(std::move(arguments)...);
    } catch (const OutOfMemory& error) {
      fail(name.text, "out of memory: could not allocate ", error.bytes, " bytes");
    } catch (const std::bad_alloc&) {
      fail(name.text, "out of memory");
    }
  }
};

}  // namespace overtone

#define OVERTONE_IMPL(library, name) OVERTONE_IMPL_AS(library, name, #name)
// `shown`: what errors call it.
#define OVERTONE_IMPL_AS(library, name, shown) \
  (library).impl(#name, TORCH_BOX((&overtone::Guarded<shown, &overtone::name>::call)))
