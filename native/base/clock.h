// Monotonic time and deadlines.
#pragma once

#include <chrono>
#include <cstdint>

namespace sparkvod {

// Nanoseconds of the monotonic clock.
inline int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// A point in time that may never come.
class Deadline {
 public:
  // `seconds` from now; 0 or less: never.
  static Deadline After(double seconds) {
    Deadline d;
    if (seconds > 0) d.at_ns_ = NowNs() + static_cast<int64_t>(seconds * 1e9);
    return d;
  }
  bool Passed() const { return at_ns_ != kNever && NowNs() >= at_ns_; }
  // Milliseconds left, rounded up, at most `most`; -1 (epoll's "for ever") when it never comes and
  // most < 0.
  int LeftMs(int most = -1) const {
    if (at_ns_ == kNever) return most;
    const int64_t left = (at_ns_ - NowNs() + 999999) / 1000000;
    const int64_t ms = left < 0 ? 0 : left > 3600000 ? 3600000 : left;
    return static_cast<int>(most >= 0 && most < ms ? most : ms);
  }

 private:
  static constexpr int64_t kNever = INT64_MAX;
  int64_t at_ns_ = kNever;
};

// Tells the processor that this is a spin loop.
inline void CpuRelax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace sparkvod
