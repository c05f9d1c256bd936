// What one rank did, and when, as a file that Perfetto and chrome://tracing open.
//
// Whoever has something to tell adds slices to a bounded buffer; a thread of the timeline's own
// writes them, so a slow disk costs slices, which are counted, and never time. Switched off it
// costs one relaxed load at each place that would tell something.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "native/base/clock.h"
#include "native/base/result.h"

namespace sparkvod {

// Where a slice is drawn. Slices of one lane nest or follow each other.
enum class Lane : uint8_t {
  kEngine,  // what the holder of the driver token does
  kTensor,  // the life of a collective, by its name
  kThread,  // what the application says about its own threads
};

struct Slice {
  Lane kind = Lane::kEngine;
  std::string lane;  // the tensor's or the thread's name; empty for the engine's lane
  std::string name;
  int64_t begin_ns = 0, end_ns = 0;  // of the monotonic clock
  int64_t bytes = -1;                // left out when negative
  std::string detail;                // left out when empty
};

// Who writes the file, for its metadata.
struct Author {
  int rank = 0, size = 1;
  std::string host;
};

class Timeline {
 public:
  Timeline() = default;
  ~Timeline() { Stop(); }
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // Begins to write to `path`, which is made anew. With `mark_cycles` negotiations that agreed on
  // nothing are told too. Start and Stop may be called from any thread.
  Result Start(const std::string& path, const Author& author, bool mark_cycles);
  // Writes what is left and closes the file; nothing when it does not run.
  void Stop();

  bool on() const { return on_.load(std::memory_order_relaxed); }
  bool mark_cycles() const { return mark_cycles_.load(std::memory_order_relaxed); }
  // Slices that belong together stay together. Thread-safe; drops them when the writer is behind.
  void Add(Slice slice);
  void Add(std::vector<Slice> slices);

  // Of the file that runs, or ran last.
  uint64_t written() const { return written_.load(); }
  uint64_t dropped() const { return dropped_.load(); }

 private:
  class File;
  void Write();

  std::atomic<bool> on_{false}, mark_cycles_{false};
  std::atomic<uint64_t> written_{0}, dropped_{0};
  std::mutex control_;  // one Start or Stop at a time
  std::mutex mu_;       // of what follows
  std::condition_variable cv_;
  std::vector<Slice> buffer_;
  bool stopping_ = false;
  std::shared_ptr<File> file_;
  std::thread writer_;
};

// A slice of the engine's lane from its construction to its destruction.
class Phase {
 public:
  // `name` must outlive the phase. `timeline` may be null.
  Phase(Timeline* timeline, const char* name, int64_t bytes = -1)
      : timeline_(timeline != nullptr && timeline->on() ? timeline : nullptr),
        name_(name),
        bytes_(bytes),
        begin_ns_(timeline_ != nullptr ? NowNs() : 0) {}
  ~Phase() {
    if (timeline_ != nullptr)
      timeline_->Add({Lane::kEngine, {}, name_, begin_ns_, NowNs(), bytes_, {}});
  }
  Phase(const Phase&) = delete;
  Phase& operator=(const Phase&) = delete;

 private:
  Timeline* timeline_;
  const char* name_;
  int64_t bytes_;
  int64_t begin_ns_;
};

}  // namespace sparkvod
