// Where the ranks of a host run.
//
// A scheduler likes to put the woken beside the waker. Two ranks that wait for each other on one
// core then hand it to and fro at each step of a collective (measured: 64 KiB take 15 us so, 2 us
// on two cores), and the scheduler has no reason to part them, since neither has much to do. So
// they part themselves.
#pragma once

#include <sched.h>

#include <cstdint>
#include <vector>

#include "native/transport/shared/arena.h"

namespace sparkvod {

class Cores {
 public:
  // Cores that this thread may use.
  static int Usable();

  Cores() = default;
  // By local rank, whose arenas tell where they waited last; none: this does nothing.
  Cores(std::vector<Arena*> arenas, int local_rank)
      : arenas_(std::move(arenas)), local_rank_(local_rank) {}

  // Tells the others where this thread runs.
  void Tell() {
    if (arenas_.empty()) return;
    std::atomic<uint32_t>& told = arenas_[static_cast<size_t>(local_rank_)]->header().core;
    const auto here = static_cast<uint32_t>(::sched_getcpu() + 1);
    if (told.load(std::memory_order_relaxed) != here) told.store(here, std::memory_order_relaxed);
  }
  // Moves the calling thread, which waits for others, away from a core where a lower rank is, to
  // one where none is; where it may run stays as it was. False when it shares its core, as far as
  // is known, and somebody else has to go on.
  bool Part();

 private:
  std::vector<Arena*> arenas_;
  int local_rank_ = 0;
  int64_t parted_ns_ = 0;
};

}  // namespace sparkvod
