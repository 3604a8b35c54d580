// The scheduler behind host_cuda.h.
#include "emulator.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#if defined(__SANITIZE_THREAD__)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#endif
#if defined(__SANITIZE_ADDRESS__)
extern "C" {
void __sanitizer_start_switch_fiber(void** save, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* save, const void** bottom, size_t* size);
}
#endif

// The scheduler's own memory is seen by all fibers and ordered by their switches, of which ThreadSanitizer is not told.
// What fibers call must not call a container's functions, which are watched.
#define UNWATCHED __attribute__((no_sanitize("thread"), noinline))

namespace host_cuda {
namespace {

constexpr unsigned kWarp = 32;
constexpr size_t kStackBytes = 64 * 1024;
constexpr size_t kGuardBytes = 4096;
constexpr unsigned char kPoison = 0xff;  // a NaN of every type
constexpr unsigned char kGuard = 0xa5;

enum class State { runnable, at_block_barrier, at_warp_barrier, at_shuffle, at_vote, finished };

const char* name_of(State state) {
  switch (state) {
    case State::at_block_barrier:
      return "__syncthreads";
    case State::at_warp_barrier:
      return "__syncwarp";
    case State::at_shuffle:
      return "a shuffle";
    case State::at_vote:
      return "a vote";
    case State::finished:
      return "its end";
    default:
      return "nothing";
  }
}

// Where ThreadSanitizer orders fibers: what was released here is seen by who acquires.
struct Meeting {
  char place = 0;
#if defined(__SANITIZE_THREAD__)
  void release() { __tsan_release(&place); }
  void acquire() { __tsan_acquire(&place); }
#else
  void release() {}
  void acquire() {}
#endif
};

void enter_fiber();

// A context that can be left and entered again. Fibers start through ucontext; switching by setjmp saves the system
// calls that swapcontext makes. The sanitizers want swapcontext.
struct Context {
  ucontext_t start;
  jmp_buf place;
  bool has_run = false;
  void* tsan = nullptr;
  void* asan = nullptr;
  const void* stack = nullptr;
  size_t stack_size = 0;
};

UNWATCHED void switch_context(Context& from, Context& to) {
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(to.tsan, 1);  // 1: the switch itself orders nothing
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from.asan, to.stack, to.stack_size);
#endif
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  swapcontext(&from.start, &to.start);
#else
  if (_setjmp(from.place) == 0) {
    if (to.has_run) {
      _longjmp(to.place, 1);
    }
    to.has_run = true;
    setcontext(&to.start);
  }
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.asan, nullptr, nullptr);
#endif
}

// `context` will enter a fiber on that stack.
UNWATCHED void prepare(Context& context, char* stack) {
  getcontext(&context.start);
  context.stack = stack;
  context.stack_size = kStackBytes;
  context.start.uc_stack.ss_sp = stack;
  context.start.uc_stack.ss_size = kStackBytes;
  context.start.uc_link = nullptr;
  makecontext(&context.start, &enter_fiber, 0);
#if defined(__SANITIZE_THREAD__)
  context.tsan = __tsan_create_fiber(0);
#endif
}

struct Fiber {
  Context context;
  unsigned index = 0;  // in the block
  State state = State::runnable;
  unsigned mask = 0;
  uint64_t given = 0;  // to a shuffle or vote
  uint64_t taken = 0;  // from it
  unsigned source = 0;
  unsigned warp_generation = 0;
};

// The fibers' stacks. Every block has new ones if a sanitizer watches, which remembers what was on the old ones.
using Stack = std::unique_ptr<char[]>;
UNWATCHED std::vector<Stack>& stacks(size_t count) {
  static std::vector<Stack> kept;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  kept.clear();
#endif
  while (kept.size() < count) {
    kept.emplace_back(new char[kStackBytes]);
  }
  return kept;
}

class Block {
 public:
  UNWATCHED Block(const Launch& launch, unsigned index, const std::function<void()>& kernel, std::mt19937_64& random,
                  Meeting& end)
      : launch_(launch),
        index_(index),
        kernel_(kernel),
        random_(random),
        end_(end),
        fibers_(launch.threads),
        warp_meetings_((launch.threads + kWarp - 1) / kWarp) {
    memory_.reset(static_cast<unsigned char*>(std::malloc(launch.shared_bytes + 2 * guard())));
    std::memset(memory_.get(), kGuard, launch.shared_bytes + 2 * guard());
    std::memset(memory_.get() + guard(), kPoison, launch.shared_bytes);
    const std::vector<Stack>& all_stacks = stacks(launch.threads);
    for (unsigned i = 0; i < launch.threads; ++i) {
      fibers_[i].index = i;
      prepare(fibers_[i].context, all_stacks[i].get());
    }
    shared_ = memory_.get() + guard();
    meetings_ = warp_meetings_.data();
  }

  UNWATCHED ~Block() {
#if defined(__SANITIZE_THREAD__)
    for (Fiber& fiber : fibers_) {
      __tsan_destroy_fiber(fiber.context.tsan);
    }
#endif
  }

  UNWATCHED void run() {
#if defined(__SANITIZE_THREAD__)
    main_.tsan = __tsan_get_current_fiber();
#endif
    main_.has_run = true;
    start_.release();
    while (!all_finished()) {
      run_warps();
      if (!all_finished()) {
        pass_block_barrier();
      }
    }
    check_guards();
  }

  // The following are called by the fiber that runs.

  UNWATCHED void begin_fiber() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &main_.stack, &main_.stack_size);
#endif
    start_.acquire();
    try {
      kernel_();
    } catch (const std::exception& error) {
      mistake_ = error.what();
    }
    end_.release();
    current_->state = State::finished;
    yield();
  }

  UNWATCHED void wait(State state, unsigned mask, uint64_t given = 0, unsigned source = 0) {
    Fiber& fiber = *current_;
    if (state != State::at_block_barrier && (mask >> (fiber.index % kWarp) & 1) == 0) {
      throw Mistake(name(fiber) + " is not in its own mask at " + name_of(state));
    }
    fiber.mask = mask;
    fiber.given = given;
    fiber.source = source;
    fiber.state = state;
    yield();
  }

  UNWATCHED void wait_for_block() {
    Meeting& meeting = barriers_[generation_ % 2];
    meeting.release();
    wait(State::at_block_barrier, 0);
    meeting.acquire();
  }

  UNWATCHED void wait_for_warp(unsigned mask) {
    Fiber& fiber = *current_;
    // Of two meetings that take turns: whoever runs ahead to the next barrier must not be seen by who leaves this one.
    Meeting& meeting = meetings_[fiber.index / kWarp].places[fiber.warp_generation++ % 2];
    meeting.release();
    wait(State::at_warp_barrier, mask);
    meeting.acquire();
  }

  UNWATCHED uint64_t taken() const { return current_->taken; }
  UNWATCHED unsigned thread() const { return current_->index; }
  UNWATCHED unsigned index() const { return index_; }
  UNWATCHED unsigned threads() const { return launch_.threads; }
  UNWATCHED unsigned char* shared() const { return shared_; }

 private:
  struct WarpMeetings {
    Meeting places[2];
  };
  struct Free {
    void operator()(unsigned char* memory) const { std::free(memory); }
  };

  // AddressSanitizer has guards of its own around every allocation.
  static constexpr size_t guard() {
#if defined(__SANITIZE_ADDRESS__)
    return 0;
#else
    return kGuardBytes;
#endif
  }

  static std::string name(const Fiber& fiber) { return "thread " + std::to_string(fiber.index); }

  UNWATCHED void yield() {
    Fiber& fiber = *current_;
    switch_context(fiber.context, main_);
  }

  UNWATCHED void resume(Fiber& fiber) {
    current_ = &fiber;
    switch_context(main_, fiber.context);
    if (!mistake_.empty()) {
      throw Mistake("block " + std::to_string(index_) + ": " + mistake_);
    }
  }

  UNWATCHED bool all_finished() const {
    return std::all_of(fibers_.begin(), fibers_.end(), [](const Fiber& f) { return f.state == State::finished; });
  }

  // Until every thread waits for the block or has finished.
  UNWATCHED void run_warps() {
    std::vector<unsigned> warps(warp_meetings_.size());
    std::iota(warps.begin(), warps.end(), 0u);
    while (!warps.empty()) {
      const size_t place = launch_.order == Order::forward   ? 0
                           : launch_.order == Order::reverse ? warps.size() - 1
                                                             : random_() % warps.size();
      if (!advance_warp(warps[place])) {
        warps.erase(warps.begin() + static_cast<std::ptrdiff_t>(place));
      }
    }
  }

  // Runs the warp's runnable lanes to where they wait. Whether there were any, or a warp operation was completed.
  UNWATCHED bool advance_warp(unsigned warp) {
    const unsigned begin = warp * kWarp, end = std::min(begin + kWarp, launch_.threads);
    unsigned lanes[kWarp];
    const unsigned count = end - begin;
    std::iota(lanes, lanes + count, begin);
    if (launch_.order == Order::reverse) {
      std::reverse(lanes, lanes + count);
    } else if (launch_.order == Order::random) {
      std::shuffle(lanes, lanes + count, random_);
    }
    bool advanced = false;
    for (unsigned i = 0; i < count; ++i) {
      if (fibers_[lanes[i]].state == State::runnable) {
        resume(fibers_[lanes[i]]);
        advanced = true;
      }
    }
    for (unsigned i = begin; i < end; ++i) {
      advanced = complete_warp_operation(begin, end, fibers_[i]) || advanced;
    }
    return advanced;
  }

  // If everybody in the fiber's mask waits as it does.
  UNWATCHED bool complete_warp_operation(unsigned begin, unsigned end, const Fiber& first) {
    if (first.state != State::at_warp_barrier && first.state != State::at_shuffle && first.state != State::at_vote) {
      return false;
    }
    const State state = first.state;
    const unsigned mask = first.mask;
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if ((mask >> lane & 1) == 0) {
        continue;
      }
      if (begin + lane >= end) {
        throw Mistake(name(first) + ": the mask at " + name_of(state) + " names lane " + std::to_string(lane) +
                      ", which the block does not have");
      }
      const Fiber& other = fibers_[begin + lane];
      if (other.state == State::runnable) {
        return false;
      }
      if (other.state != state || other.mask != mask) {
        throw Mistake(name(first) + " waits at " + name_of(state) + " for " + name(other) + ", which is at " +
                      name_of(other.state) + (other.state == state ? " with another mask" : ""));
      }
      ballot |= static_cast<unsigned>(other.given != 0) << lane;
    }
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if ((mask >> lane & 1) != 0) {
        Fiber& fiber = fibers_[begin + lane];
        if (state == State::at_shuffle && (mask >> fiber.source & 1) == 0) {
          throw Mistake(name(fiber) + " shuffles from lane " + std::to_string(fiber.source) + ", outside of its mask");
        }
        fiber.taken = state == State::at_shuffle ? fibers_[begin + fiber.source].given : ballot;
      }
    }
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if ((mask >> lane & 1) != 0) {
        fibers_[begin + lane].state = State::runnable;
      }
    }
    return true;
  }

  UNWATCHED void pass_block_barrier() {
    for (const Fiber& fiber : fibers_) {
      if (fiber.state != State::at_block_barrier) {
        const auto waits = std::find_if(fibers_.begin(), fibers_.end(),
                                        [](const Fiber& f) { return f.state == State::at_block_barrier; });
        throw Mistake(name(*waits) + " waits at __syncthreads for " + name(fiber) + ", which is at " +
                      name_of(fiber.state));
      }
    }
    for (Fiber& fiber : fibers_) {
      fiber.state = State::runnable;
    }
    ++generation_;
  }

  UNWATCHED void check_guards() const {
    const unsigned char* const end = shared() + launch_.shared_bytes;
    const auto is_guard = [](unsigned char byte) { return byte == kGuard; };
    if (!std::all_of(memory_.get(), memory_.get() + guard(), is_guard) || !std::all_of(end, end + guard(), is_guard)) {
      throw Mistake("block " + std::to_string(index_) + " wrote outside of its shared memory");
    }
  }

  const Launch& launch_;
  unsigned index_;
  const std::function<void()>& kernel_;
  std::mt19937_64& random_;
  Meeting& end_;
  std::vector<Fiber> fibers_;
  std::vector<WarpMeetings> warp_meetings_;
  std::unique_ptr<unsigned char, Free> memory_;
  unsigned char* shared_ = nullptr;
  WarpMeetings* meetings_ = nullptr;
  Context main_;
  Fiber* current_ = nullptr;
  unsigned generation_ = 0;
  Meeting start_, barriers_[2];
  std::string mistake_;
};

Block* block = nullptr;  // that runs

UNWATCHED void enter_fiber() { block->begin_fiber(); }

}  // namespace

UNWATCHED void run(const Launch& launch, const std::function<void()>& kernel) {
  std::mt19937_64 random(launch.seed);
  std::vector<unsigned> indices(launch.blocks);
  std::iota(indices.begin(), indices.end(), 0u);
  if (launch.order == Order::reverse) {
    std::reverse(indices.begin(), indices.end());
  } else if (launch.order == Order::random) {
    std::shuffle(indices.begin(), indices.end(), random);
  }
  Meeting end;  // of all blocks: nothing orders them among themselves
  for (const unsigned index : indices) {
    Block one(launch, index, kernel, random, end);
    block = &one;
    one.run();
  }
  end.acquire();
}

UNWATCHED Index thread_index() { return {block->thread()}; }
UNWATCHED Index block_index() { return {block->index()}; }
UNWATCHED Index block_size() { return {block->threads()}; }
UNWATCHED void* shared_memory() { return block->shared(); }
UNWATCHED void block_barrier() { block->wait_for_block(); }
UNWATCHED void warp_barrier(unsigned mask) { block->wait_for_warp(mask); }

UNWATCHED uint64_t exchange(unsigned mask, uint64_t bits, unsigned source) {
  block->wait(State::at_shuffle, mask, bits, source);
  return block->taken();
}

UNWATCHED unsigned vote(unsigned mask, bool predicate) {
  block->wait(State::at_vote, mask, predicate);
  return static_cast<unsigned>(block->taken());
}

}  // namespace host_cuda
