// Ranks of a native bench: forked processes, and what they share.
//
// Every measured call begins when the last rank begins it and ends when the last rank has ended it,
// on the one clock that all processes of a machine have.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace sparkvod::bench {

constexpr int kMaxRanks = 16;

// What the ranks share beside their data.
class Ranks {
 public:
  Ranks(int size, int calls);

  // Runs `body` in a process for each rank and returns the seconds of every call. Ends the program
  // when a rank fails.
  // `pinned`: each to a core of its own, where there are enough.
  std::vector<double> Run(bool pinned, const std::function<void(int rank)>& body);

  int size() const { return size_; }
  int calls() const { return calls_; }
  // Spins until all ranks are here; after a while, or at once when the ranks outnumber the cores,
  // it offers the core meanwhile.
  void Barrier(int rank);
  // One call, after a warm-up of `kWarmUp` that are not measured: `prepare`, barrier, `call`.
  void Measure(int rank, const std::function<void()>& prepare, const std::function<void()>& call);
  // Calls back to back, each measured by itself on every rank.
  void MeasureLatency(int rank, const std::function<void()>& call);
  // All-gathers bytes, once.
  std::vector<std::string> Gather(int rank, const std::string& bytes);

 private:
  static constexpr int kWarmUp = 3;
  static constexpr int kSpins = 200;  // at a barrier, before the core is offered to others
  static constexpr size_t kGatherBytes = 16 << 10;
  struct Arrivals {
    alignas(64) std::atomic<uint32_t> count;
  };
  struct Told {
    size_t length;
    char bytes[kGatherBytes];
  };

  int64_t* Began(int rank) const { return times_ + 2 * rank * calls_; }
  int64_t* Ended(int rank) const { return Began(rank) + calls_; }

  int size_, calls_;
  bool crowded_;
  uint32_t barriers_ = 0;
  Arrivals* arrivals_;
  Told* told_;
  int64_t* times_;
  std::atomic<uint32_t>* back_to_back_;
};

// Zeroed memory that forked processes share, and memory of this process alone.
char* SharedMemory(size_t bytes);
char* PrivateMemory(size_t bytes);

// Ends the program with a message.
[[noreturn]] void Fail(const std::string& why);

// Ends the program unless all `count` floats are `expected`.
void Expect(const float* data, size_t count, float expected, const std::string& what);

}  // namespace sparkvod::bench
