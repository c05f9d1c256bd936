// The choice of algorithms: what it is where it matters, that wishes are kept, and that no size or
// layout leaves it without an answer.
#include "native/collectives/cost.h"

#include <string>
#include <vector>

#include "tests/native/check.h"

namespace sparkvod {
namespace {

Layout Flat(int ranks) { return {ranks, ranks, 1, false, false}; }
const Layout kOneHost{4, 1, 4, true, false};
const Layout kTwoHosts{4, 2, 2, false, true};

std::string Allreduce(uint64_t bytes, const Layout& layout, int64_t round_trip_us = 100,
                      double gbits = 10) {
  return NameOf(
      ChooseAllreduce(Algorithm::kAuto, bytes, false, layout, LinkCostOf(round_trip_us, gbits)));
}

std::string Broadcast(uint64_t bytes, int ranks, int64_t round_trip_us = 100) {
  return NameOf(
      ChooseBroadcast(Algorithm::kAuto, bytes, Flat(ranks), LinkCostOf(round_trip_us, 10)));
}

TEST(CostsChooseByBytesRanksAndHosts) {
  constexpr uint64_t kMiB = 1 << 20;
  for (uint64_t bytes : {uint64_t{4}, uint64_t{64 << 10}, kMiB, 64 * kMiB, uint64_t{1} << 40}) {
    EXPECT_EQ(Allreduce(bytes, kOneHost, 0), "direct");
    for (double gbits : {1.0, 10.0, 100.0})
      EXPECT_EQ(Allreduce(bytes, kTwoHosts, 100, gbits), "hierarchical");
  }
  for (int ranks : {2, 3, 4, 8, 13, 64}) {
    EXPECT_EQ(Allreduce(4, Flat(ranks)), "doubling");
    EXPECT_EQ(Allreduce(1024 * kMiB, Flat(ranks)), "ring");
  }
  // In between, with a power of two of ranks, fewer steps for the ring's bytes.
  EXPECT_EQ(Allreduce(kMiB, Flat(8)), "halving-doubling");
  EXPECT_EQ(Allreduce(kMiB, Flat(64)), "halving-doubling");
  EXPECT_EQ(Allreduce(4 * kMiB, Flat(13)), "ring");
  // A distant peer makes steps dear, a slow link bytes.
  EXPECT_EQ(Allreduce(4 * kMiB, Flat(4), 100), "ring");
  EXPECT_EQ(Allreduce(4 * kMiB, Flat(4), 20000), "doubling");
  EXPECT_EQ(Allreduce(4 * kMiB, Flat(4), 20000, 0.5), "halving-doubling");
  // Pairs between hosts share a link of several ranks, the ring's edges do not.
  EXPECT_EQ(Allreduce(2 * kMiB, Flat(8)), "halving-doubling");
  EXPECT_EQ(Allreduce(2 * kMiB, {8, 3, 3, false, false}), "ring");

  for (int ranks : {2, 3, 8, 64}) EXPECT_EQ(Broadcast(64 * kMiB, ranks), "chain");
  for (int ranks : {4, 8, 64}) EXPECT_EQ(Broadcast(4, ranks), "tree");
  EXPECT_EQ(Broadcast(kMiB, 64), "tree");
  EXPECT_EQ(Broadcast(kMiB, 4), "chain");
  EXPECT_EQ(Broadcast(kMiB, 8, 20000), "tree");
}

TEST(CostsOfLargeWorldsDoNotOverflow) {
  for (int ranks : {2, 3, 1000, 1 << 20}) {
    for (int per_host : {1, 4, 1000}) {
      const Layout layout{ranks, (ranks + per_host - 1) / per_host, per_host, false, per_host > 1};
      for (double gbits : {0.01, 1e5}) {
        const LinkCost link = LinkCostOf(10000000, gbits);
        for (Algorithm a : {Algorithm::kRing, Algorithm::kHalvingDoubling, Algorithm::kDoubling,
                            Algorithm::kTree}) {
          // More bytes never cost less.
          uint64_t before = 0;
          for (int log = 0; log < 63; log += 3) {
            const uint64_t cost = AllreduceCost(a, uint64_t{1} << log, false, layout, link);
            EXPECT(cost >= before && cost < kNever);
            before = cost;
          }
        }
        EXPECT(ChooseAllreduce(Algorithm::kAuto, ~uint64_t{0}, false, layout, link) !=
               Algorithm::kAuto);
        EXPECT(ChooseBroadcast(Algorithm::kAuto, ~uint64_t{0}, layout, link) != Algorithm::kAuto);
      }
    }
  }
}

TEST(CostsKeepWishesWhereTheyApply) {
  const LinkCost link = LinkCostOf(100, 10);
  const auto wished = [&](Algorithm wish, const Layout& layout) {
    return std::string(NameOf(ChooseAllreduce(wish, 1 << 20, false, layout, link)));
  };
  EXPECT_EQ(wished(Algorithm::kTree, Flat(8)), "tree");
  EXPECT_EQ(wished(Algorithm::kRing, kOneHost), "ring");
  EXPECT_EQ(wished(Algorithm::kRing, kTwoHosts), "ring");
  EXPECT_EQ(wished(Algorithm::kDirect, Flat(8)), "halving-doubling");
  EXPECT_EQ(wished(Algorithm::kHierarchical, kOneHost), "direct");
  Wishes wishes;
  Config config;
  config.allreduce_algorithm = "halving-doubling";
  config.broadcast_algorithm = "chain";
  EXPECT_EQ(WishesOf(config, &wishes).Report(), "ok");
  EXPECT(wishes.allreduce == Algorithm::kHalvingDoubling);
  EXPECT(wishes.broadcast == Algorithm::kChain);
  config.broadcast_algorithm = "ring";
  EXPECT_EQ(WishesOf(config, &wishes).Report(),
            "SPARKVOD_BROADCAST_ALGORITHM='ring' was found, one of auto, direct, chain, tree was "
            "expected");
}

}  // namespace
}  // namespace sparkvod
