// The ranks that an algorithm runs among.
#pragma once

#include <vector>

#include "native/collectives/communicator.h"

namespace sparkvod {

// Some ranks of a communicator, in an order that all of them know, and this rank's place there.
struct Party {
  std::vector<int> ranks;
  int place = 0;

  int size() const { return static_cast<int>(ranks.size()); }
  int rank(int at) const { return ranks[static_cast<size_t>(at)]; }
};

// All ranks, in order.
inline Party Everybody(const Communicator& comm) {
  Party party;
  for (int r = 0; r < comm.size(); ++r) party.ranks.push_back(r);
  party.place = comm.rank();
  return party;
}

}  // namespace sparkvod
