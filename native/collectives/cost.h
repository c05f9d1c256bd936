// Which algorithm carries a collective: the one that costs least by the table below.
//
// The costs are the α-β-γ model of docs/algorithms.md: α for a message, β for a byte of it, γ for a
// byte that is combined. What they are made of is the same on every rank (sizes, the layout of the
// ranks, knobs that bootstrap has compared, a round trip that the ranks have agreed on), and they
// are whole numbers, so that all ranks choose the same.
#pragma once

#include <cstdint>
#include <string>

#include "native/base/config.h"
#include "native/base/result.h"

namespace sparkvod {

enum class Algorithm : uint8_t {
  kAuto = 0,  // no algorithm: the cheapest
  kDirect,
  kHierarchical,
  kRing,
  kHalvingDoubling,
  kDoubling,
  kChain,
  kTree,
};
// As knobs and stats() have it.
const char* NameOf(Algorithm algorithm);

// What the knobs ask for, kAuto where they leave it to the table.
struct Wishes {
  Algorithm allreduce = Algorithm::kAuto;
  Algorithm broadcast = Algorithm::kAuto;
};
// An unknown word is an error that names the valid ones.
Result WishesOf(const Config& config, Wishes* out);

// How the ranks of a collective lie.
struct Layout {
  int ranks = 1;
  int hosts = 1;
  int per_host = 1;            // ranks of the host that has most
  bool shares_memory = false;  // all of them
  bool hierarchical = false;   // HierarchicalAllreduce applies
};

// A message between two ranks that share no memory.
struct LinkCost {
  uint64_t alpha_ns = 0;
  uint64_t beta_ps = 0;
};
// round_trip_us: the longest between any two ranks; 0 where all of them share memory. gbits: the
// knob's, 10^9 bits per second of a host's link.
LinkCost LinkCostOf(int64_t round_trip_us, double gbits);

constexpr uint64_t kNever = ~uint64_t{0};
// Picoseconds that an allreduce, or a broadcast, of so many bytes takes; kNever where the algorithm
// does not apply. in_place: every rank has the data in engine memory, whence it need not be copied.
uint64_t AllreduceCost(Algorithm algorithm, uint64_t bytes, bool in_place, const Layout& layout,
                       const LinkCost& link);
uint64_t BroadcastCost(Algorithm algorithm, uint64_t bytes, const Layout& layout,
                       const LinkCost& link);

// The wish, where it applies; else the cheapest.
Algorithm ChooseAllreduce(Algorithm wish, uint64_t bytes, bool in_place, const Layout& layout,
                          const LinkCost& link);
Algorithm ChooseBroadcast(Algorithm wish, uint64_t bytes, const Layout& layout,
                          const LinkCost& link);

// What a hierarchical allreduce of `bytes` makes of each local rank's share between hosts.
Algorithm ChooseAcrossHosts(uint64_t bytes, const Layout& layout, const LinkCost& link);

}  // namespace sparkvod
