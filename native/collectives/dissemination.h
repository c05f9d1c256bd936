// The engine's agreement: in ceil(log2 n) rounds, for any n, every rank hears from every rank.
//
// In round k rank r sends to r + 2^k and hears from r - 2^k (modulo n). AND and OR do not mind
// hearing the same rank twice, so the same rounds serve n that are no powers of two. (Hensgen,
// Finkel and Manber, "Two algorithms for barrier synchronization", 1988; the all-gather is Bruck's,
// 1997.)
//
// A cycle begins at the rank that has something to say and spreads: whoever is idle joins when the
// first message reaches it. From the second round on the first messages wait for others, so a rank
// that joins first wakes its later partners.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "native/collectives/communicator.h"

namespace sparkvod {

class Dissemination {
 public:
  explicit Dissemination(Communicator* comm);

  // True when a peer has begun the cycle after the last one.
  Result PeerBegan(bool* began);
  // One cycle: `flags` become the OR, `bits` the AND over all ranks. All ranks pass equally many
  // bits.
  Result Agree(uint16_t* flags, std::vector<uint64_t>* bits);
  // Every rank's bytes, by rank.
  Result Allgather(const std::string& own, std::vector<std::string>* all);
  uint64_t cycles() const { return cycle_; }

 private:
  struct Header {
    uint32_t magic;
    uint8_t kind;
    uint8_t round;
    uint16_t flags;
    uint64_t cycle;
  };
  static_assert(sizeof(Header) == 16);

  int To(int round) const { return (comm_->rank() + (1 << round)) % comm_->size(); }
  int From(int round) const {
    return (comm_->rank() + comm_->size() - (1 << round)) % comm_->size();
  }
  Result Exchange(int to, const std::string& out, int from, std::string* in);
  Result RecvRound(int from, int round, Header* header);

  Communicator* comm_;
  int rounds_ = 0;
  uint64_t cycle_ = 0;
  std::vector<char> buffer_;
  std::vector<uint64_t> heard_;
};

}  // namespace sparkvod
