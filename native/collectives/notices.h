// The agreement of ranks that all share memory: each lays down a notice and reads the others'.
//
// One step where messages take ceil(log2 n), and one cache line from each other rank. With its
// notice a rank may give data of its own, which then needs no step to be there: a small tensor is
// summed as soon as all ranks have been heard.
//
// Each rank has two places for its notices, in turn. When it writes one again, all others have
// given the notice in between, so they have ended the cycle of the one before, and what they did
// with its data.
#pragma once

#include <cstdint>
#include <vector>

#include "native/collectives/communicator.h"

namespace sparkvod {

class Notices {
 public:
  // Ranks from which reading all notices takes longer than messages in rounds.
  static constexpr int kMostRanks = 16;
  // Whether they can be the agreement of these ranks, on at most so many bits.
  static bool Serve(const Communicator& comm, size_t bits) {
    return comm.shares_memory() && comm.size() > 1 && comm.size() <= kMostRanks &&
           bits / 8 + kCacheLine <= Geometry::kNoticeBytes - kRoomBytes;
  }

  explicit Notices(Communicator* comm) : comm_(comm) {}

  // True when a peer has begun the cycle after the last one.
  bool PeerBegan() const;
  // Room for data that goes with the next notice, which has that many words of bits.
  char* room(size_t words) { return DataOf(Own(cycle_ + 1), words); }
  static constexpr size_t kRoomBytes = Geometry::kNoticeBytes / 2;
  // One cycle: `flags` become the OR, `bits` the AND over all ranks. All ranks pass equally many
  // bits. `offer`: 1 + the bit that the data is about, 0: there is none; becomes 0 unless all ranks
  // have the same.
  Result Agree(uint16_t* flags, std::vector<uint64_t>* bits, uint32_t* offer);
  // What a rank gave with its notice of the last cycle.
  const char* data(int rank, size_t words) const { return DataOf(Of(rank, cycle_), words); }
  uint64_t cycles() const { return cycle_; }

 private:
  struct Notice {
    std::atomic<uint64_t> cycle;
    uint32_t offer;
    uint16_t flags;
    uint16_t words;
    uint64_t bits[1];
  };
  static char* DataOf(Notice& notice, size_t words);
  Notice& Of(int rank, uint64_t cycle) const {
    return *reinterpret_cast<Notice*>(comm_->arena(rank).notice(static_cast<int>(cycle & 1)));
  }
  Notice& Own(uint64_t cycle) const { return Of(comm_->rank(), cycle); }

  Communicator* comm_;
  uint64_t cycle_ = 0;
};

}  // namespace sparkvod
