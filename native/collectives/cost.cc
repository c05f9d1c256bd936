#include "native/collectives/cost.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "native/collectives/reduce_step.h"

namespace sparkvod {
namespace {

struct Named {
  Algorithm algorithm;
  const char* name;
  bool allreduces, broadcasts;
};
// Of equal costs the first is chosen.
constexpr Named kTable[] = {
    {Algorithm::kAuto, "auto", true, true},
    {Algorithm::kDirect, "direct", true, true},
    {Algorithm::kHierarchical, "hierarchical", true, false},
    {Algorithm::kRing, "ring", true, false},
    {Algorithm::kHalvingDoubling, "halving-doubling", true, false},
    {Algorithm::kDoubling, "doubling", true, false},
    {Algorithm::kChain, "chain", false, true},
    {Algorithm::kTree, "tree", true, true},
};

// Measured on two cores of a server; they need to be right to a factor of two only.
constexpr uint64_t kNs = 1000, kUs = 1000000;        // ps
constexpr uint64_t kCombinePs = 100;                 // γ: a byte that is combined with another
constexpr uint64_t kCopyPs = 50;                     // a byte that is copied in memory
constexpr uint64_t kAsidePs = 200;                   // a byte that arrives in fresh memory first
constexpr uint64_t kMeetPs = 3 * kUs;                // all ranks of a host wait for each other
constexpr uint64_t kTcpNs = 8000, kSharedNs = 6000;  // of CPU, to send and receive a message
constexpr uint64_t kSharedBetaPs = 250;              // a byte through a ring in shared memory
// Exchanges with changing partners begin with an idle connection each.
constexpr uint64_t WithPairs(uint64_t beta_ps) { return beta_ps + beta_ps / 16; }
// So that no cost overflows; the choice does not change beyond.
constexpr uint64_t kMostBytes = uint64_t{1} << 34;
constexpr int kMostPerHost = 64;

uint64_t Log2(uint64_t n, bool up) {
  uint64_t log = 0;
  while ((uint64_t{2} << log) <= n) ++log;
  return up && (uint64_t{1} << log) < n ? log + 1 : log;
}

uint64_t PerRank(uint64_t bytes, uint64_t ranks) { return (bytes + ranks - 1) / ranks; }

Result Find(const char* knob, const std::string& word, bool Named::* serves, Algorithm* out) {
  std::string known;
  for (const Named& named : kTable) {
    if (!(named.*serves)) continue;
    if (word == named.name) {
      *out = named.algorithm;
      return {};
    }
    known += (known.empty() ? "" : ", ") + std::string(named.name);
  }
  return Result::Fail(Code::kInvalid, std::string(knob) + "='" + word + "' was found, one of " +
                                          known + " was expected");
}

// Of allreduces among ranks that send messages to each other. Where hosts have several ranks,
// those of a host send at the same time over its link: in all steps of pairs on several hosts.
uint64_t MessagesCost(Algorithm algorithm, uint64_t bytes, const Layout& layout,
                      const LinkCost& link) {
  const auto n = static_cast<uint64_t>(layout.ranks);
  const uint64_t alpha = link.alpha_ns * kNs;
  // Within a host a byte goes no faster, however fast the network is.
  const uint64_t beta = layout.per_host > 1 ? std::max(link.beta_ps, kSharedBetaPs) : link.beta_ps;
  if (algorithm == Algorithm::kRing)
    return (n - 1) * (2 * alpha + PerRank(bytes, n) * (2 * beta + kCombinePs));
  if (algorithm == Algorithm::kTree)
    return Log2(n, true) * (2 * alpha + bytes * (2 * beta + kCombinePs));

  const uint64_t steps = Log2(n, false);
  const bool halves = algorithm == Algorithm::kHalvingDoubling;
  uint64_t cost = 0;
  for (uint64_t step = 0; step < steps; ++step) {
    const bool crosses = layout.hosts > 1 && (1 << step) >= layout.per_host;
    const auto load = static_cast<uint64_t>(crosses ? std::min(layout.per_host, kMostPerHost) : 1);
    const uint64_t moved = halves ? PerRank(bytes, uint64_t{2} << step) : bytes;
    cost += (halves ? 2 : 1) * (alpha + moved * load * WithPairs(beta)) +
            moved * (kCombinePs + (halves ? 0 : kAsidePs));
  }
  if ((uint64_t{1} << steps) < n) cost += 2 * (alpha + bytes * beta) + bytes * kCombinePs;
  return cost;
}

// Between hosts, when every rank of a host carries its own share.
Layout AcrossHosts(const Layout& layout) { return {layout.hosts, layout.hosts, 1, false, false}; }
LinkCost Shared(const Layout& layout, LinkCost link) {
  link.beta_ps *= static_cast<uint64_t>(std::min(layout.per_host, kMostPerHost));
  return link;
}

template <typename CostOf>
Algorithm Cheapest(bool Named::* serves, CostOf cost_of) {
  Algorithm best = Algorithm::kAuto;
  uint64_t least = kNever;
  for (const Named& named : kTable) {
    if (!(named.*serves)) continue;
    const uint64_t cost = cost_of(named.algorithm);
    if (cost < least) {
      least = cost;
      best = named.algorithm;
    }
  }
  return best;
}

}  // namespace

const char* NameOf(Algorithm algorithm) { return kTable[static_cast<size_t>(algorithm)].name; }

Result WishesOf(const Config& config, Wishes* out) {
  SPARKVOD_TRY(Find("SPARKVOD_ALLREDUCE_ALGORITHM", config.allreduce_algorithm, &Named::allreduces,
                    &out->allreduce));
  return Find("SPARKVOD_BROADCAST_ALGORITHM", config.broadcast_algorithm, &Named::broadcasts,
              &out->broadcast);
}

LinkCost LinkCostOf(int64_t round_trip_us, double gbits) {
  if (round_trip_us == 0) return {kSharedNs, kSharedBetaPs};
  return {kTcpNs + static_cast<uint64_t>(round_trip_us) * 500,
          static_cast<uint64_t>(std::llround(8000 / gbits))};
}

uint64_t AllreduceCost(Algorithm algorithm, uint64_t bytes, bool in_place, const Layout& layout,
                       const LinkCost& link) {
  bytes = std::min(bytes, kMostBytes);
  const uint64_t copies = in_place ? 0 : 2 * bytes * kCopyPs;
  switch (algorithm) {
    case Algorithm::kDirect:
      return layout.shares_memory ? 2 * kMeetPs + copies + bytes * (kCombinePs + kCopyPs) : kNever;
    case Algorithm::kHierarchical: {
      if (!layout.hierarchical) return kNever;
      const uint64_t share = PerRank(bytes, static_cast<uint64_t>(layout.per_host));
      return 3 * kMeetPs + copies + bytes * (kCombinePs + kCopyPs) +
             MessagesCost(ChooseAcrossHosts(bytes, layout, link), share, AcrossHosts(layout),
                          Shared(layout, link));
    }
    case Algorithm::kRing:
    case Algorithm::kHalvingDoubling:
    case Algorithm::kDoubling:
    case Algorithm::kTree:
      return MessagesCost(algorithm, bytes, layout, link);
    default:
      return kNever;
  }
}

uint64_t BroadcastCost(Algorithm algorithm, uint64_t bytes, const Layout& layout,
                       const LinkCost& link) {
  bytes = std::min(bytes, kMostBytes);
  const auto n = static_cast<uint64_t>(layout.ranks);
  const uint64_t alpha = link.alpha_ns * kNs, beta = link.beta_ps;
  switch (algorithm) {
    case Algorithm::kDirect:
      return layout.shares_memory ? 2 * kMeetPs + bytes * kCopyPs : kNever;
    case Algorithm::kTree:
      return Log2(n, true) * (alpha + bytes * beta);
    case Algorithm::kChain:
      return (n - 1) * alpha + bytes * beta +
             (n - 2) * std::min<uint64_t>(bytes, kStepPieceBytes) * beta;
    default:
      return kNever;
  }
}

Algorithm ChooseAllreduce(Algorithm wish, uint64_t bytes, bool in_place, const Layout& layout,
                          const LinkCost& link) {
  const auto cost = [&](Algorithm a) { return AllreduceCost(a, bytes, in_place, layout, link); };
  return cost(wish) < kNever ? wish : Cheapest(&Named::allreduces, cost);
}

Algorithm ChooseBroadcast(Algorithm wish, uint64_t bytes, const Layout& layout,
                          const LinkCost& link) {
  const auto cost = [&](Algorithm a) { return BroadcastCost(a, bytes, layout, link); };
  return cost(wish) < kNever ? wish : Cheapest(&Named::broadcasts, cost);
}

Algorithm ChooseAcrossHosts(uint64_t bytes, const Layout& layout, const LinkCost& link) {
  const uint64_t share =
      PerRank(std::min(bytes, kMostBytes), static_cast<uint64_t>(layout.per_host));
  return ChooseAllreduce(Algorithm::kAuto, share, true, AcrossHosts(layout), Shared(layout, link));
}

}  // namespace sparkvod
