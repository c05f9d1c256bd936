// How fast a rank's collectives go: bytes and time of so many steps of the training at a time.
//
// A step is what lies between two collectives of one name: what is trained submits the same names
// in each step, and whichever comes round first as often as asked for ends the sample. So a sample
// is whole steps, whatever they consist of, and the front end need not say where one begins.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "native/engine/negotiator.h"

namespace sparkvod {

struct Sample {
  uint64_t bytes = 0;  // that this rank's collectives carried
  int64_t ns = 0;      // from the end of the first step's first cycle to that of the last one's
};

class Meter {
 public:
  // Begins to take samples of `steps` steps; 0 ends it, and wakes who waits for one. Thread-safe.
  void Start(int64_t steps);
  // Waits until there is a sample; false when there was none in time, or none is taken.
  // Thread-safe.
  bool Next(double seconds, Sample* sample);
  bool on() const { return steps_.load(std::memory_order_relaxed) > 0; }

  // By the driver: what a cycle has executed when `bytes` in all had been carried.
  void Count(const std::vector<Agreed>& agreed, uint64_t bytes);
  // Forgets the sample that has begun, and those that nobody took: something has changed.
  void Restart();

 private:
  // When a name first came in this sample, and how often since.
  struct Seen {
    int64_t count = 0;
    uint64_t bytes = 0;
    int64_t ns = 0;
  };
  // Names that never come again are forgotten from here on.
  static constexpr size_t kMostNames = 1 << 16;
  // Samples that nobody takes are dropped from here on, the oldest first.
  static constexpr size_t kMostSamples = 64;

  std::atomic<int64_t> steps_{0};
  std::mutex mutex_;
  std::condition_variable cv_;
  std::deque<Sample> samples_;
  std::unordered_map<std::string, Seen> seen_;
};

}  // namespace sparkvod
