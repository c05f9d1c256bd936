// Runs a body once per rank, as threads of this process or as processes of their own, under a
// deadline.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "tests/native/check.h"

namespace sparkvod::check {

// All-gathers bytes among the ranks of one run, threads or processes: what a launcher does.
class Board {
 public:
  static constexpr int kMaxRanks = 256;
  static constexpr size_t kMaxBytes = 16 << 10;

  explicit Board(int size);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  int size() const { return size_; }
  // Every rank calls it as often as the others; returns what they gave, by rank.
  std::vector<std::string> Gather(int rank, const std::string& bytes);
  void Barrier(int rank) { Gather(rank, ""); }

 private:
  struct Slot {
    std::atomic<uint32_t> round;
    uint32_t length;
    char bytes[kMaxBytes];
  };
  struct Shared {
    std::atomic<uint32_t> read[kMaxRanks];  // rounds that each rank has read to the end
    Slot slots[kMaxRanks];
  };
  int size_;
  Shared* shared_;  // memory that forked processes share
};

// Whether processes may be forked and killed: not under TSan, which does not follow them.
bool CanFork();

// Whether connections can be encrypted here; says why not, if they cannot. Not under TSan, which
// does not see how the library, built without it, keeps its threads apart.
bool CanEncrypt();

// Descriptors that this process has open.
int OpenFiles();
// Raises the soft limit of descriptors where `files` need that; false when the hard limit forbids
// it.
bool MayOpenFiles(int files);

// What this process holds open; a test makes one before, and asks it after, whether anything is
// left.
class Holdings {
 public:
  Holdings();
  // Threads that have ended may be listed for a moment longer, so it looks again for a while.
  void ExpectUnchanged(const char* file, int line) const;

 private:
  int files_, threads_;
};

using Body = std::function<void(int rank, Board& board)>;

// Seconds until a run counts as hung. The full products take minutes, under a sanitizer.
inline double Patience() { return Full() ? (kSanitized ? 900 : 300) : 60; }

// One thread per rank. Threads cannot be ended from outside: past the deadline the program ends.
void RunThreads(int size, const Body& body, double seconds = Patience());

// One process per rank; returns their wait statuses. Past the deadline those that are left are
// killed and the test fails, as it does when a rank's expectations fail. `killed`: ranks that are
// expected to die by a signal.
std::vector<int> RunProcesses(int size, const Body& body, const std::vector<int>& killed = {},
                              double seconds = Patience());

}  // namespace sparkvod::check
