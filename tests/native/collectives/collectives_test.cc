// The algorithms over every transport, on worlds of any size, without an engine above them.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "native/collectives/direct.h"
#include "native/collectives/dissemination.h"
#include "native/collectives/notices.h"
#include "native/collectives/recursive.h"
#include "native/collectives/ring.h"
#include "native/collectives/tree.h"
#include "tests/native/check.h"
#include "tests/native/terms.h"
#include "tests/native/transport/worlds.h"

namespace sparkvod {
namespace {

using check::Board;
using check::ConfigOf;
using check::ForEachTransport;
using check::Term;
using check::Terms;
using check::Transport;

const std::vector<int> kWorldSizes = {1, 2, 3, 5, 8};
const std::vector<size_t> kCounts = {0, 1, 2, 7, 16, 1001, 70001};

void OnEveryWorld(const std::function<void(Communicator&, Board&)>& body) {
  for (int size : kWorldSizes) {
    ForEachTransport(size, [&](World& world, const Transport& transport, Board& board) {
      Communicator comm(&world, ConfigOf(transport), [] { return Result(); });
      body(comm, board);
    });
  }
}

std::vector<float> Sums(int size, size_t count, double scale = 1) {
  std::vector<float> sums(count);
  for (size_t i = 0; i < count; ++i) {
    for (int r = 0; r < size; ++r) sums[i] += Term(r, i);
    sums[i] *= static_cast<float>(scale);
  }
  return sums;
}

// Rank 2 does nothing; rank 1 waits for it, and rank 0 for rank 1, whose wait begins, and so ends,
// later: rank 0 speaks first, and must not put the blame on rank 1 alone.
TEST(WhoeverIsWaitedForIsSaidToWaitItself) {
  ForEachTransport(3, [](World& world, const Transport& transport, Board& board) {
    Config config = ConfigOf(transport);
    config.collective_timeout = 1;
    Communicator comm(&world, config, [] { return Result(); });
    const int rank = comm.rank();
    char byte = 0;
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(400));
    const std::string waited = rank == 2 ? "" : comm.Recv(rank + 1, &byte, 1).Report();
    board.Barrier(rank);
    if (rank == 1) EXPECT(waited.find("for " + comm.Name(2) + " in ") != std::string::npos);
    if (rank == 0) {
      const bool knows = !world.local_arenas.empty();
      const std::string whom =
          comm.Name(1) + (knows ? " (which waits for " + comm.Name(2) + ")" : "");
      EXPECT(waited.find("for " + whom + " in ") != std::string::npos);
    }
  });
}

// A socket tells of a death but once. Who was waiting for something that has come all the same
// must not wait for the dead in what follows.
TEST(ADeathIsRememberedWhereItWasNotMinded) {
  if (!check::CanFork()) return;
  const auto survive = [](World& world, const Transport& transport, Board& board) {
    Config config = ConfigOf(transport);
    config.spin_us = 0;
    Communicator comm(&world, config, [] { return Result(); });
    board.Barrier(comm.rank());
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      ::raise(SIGKILL);
    }
    using Step = Communicator::Step;
    Step step = Step::kStuck;
    const auto woken = [&comm](Step* s) -> Result {
      *s = comm.sleeps() > 0 ? Step::kDone : Step::kStuck;
      return {};
    };
    EXPECT_EQ(comm.Await(kForMessage, 20000, woken, &step).Report(), "ok");
    EXPECT(step == Step::kDone);
    const auto stuck = [](Step* s) -> Result {
      *s = Step::kStuck;
      return {};
    };
    const int64_t began = NowNs();
    EXPECT(comm.Await(kForMessage, 5000, stuck, &step).code() == Code::kPeerLost);
    EXPECT(NowNs() - began < 1000000000);
  };
  ForEachTransport(2, survive, {1});
}

using AllreduceAmong = Result (*)(Communicator&, const Party&, DType, void*, size_t, Finish);
const std::vector<AllreduceAmong> kAllreduces = {RingAllreduce, HalvingDoublingAllreduce,
                                                 DoublingAllreduce, TreeAllreduce};

// Among all ranks, and in the largest worlds also among the first seven and six, and every other.
std::vector<Party> PartiesOf(const Communicator& comm) {
  std::vector<Party> parties = {Everybody(comm)};
  if (comm.size() < 8) return parties;
  for (const std::vector<int>& ranks :
       std::vector<std::vector<int>>{{0, 1, 2, 3, 4, 5, 6}, {5, 4, 3, 2, 1, 0}, {1, 3, 5, 7}}) {
    const auto me = std::find(ranks.begin(), ranks.end(), comm.rank());
    if (me != ranks.end()) parties.push_back({ranks, static_cast<int>(me - ranks.begin())});
  }
  return parties;
}

TEST(AllreducesOverChannelsSum) {
  OnEveryWorld([](Communicator& comm, Board&) {
    if (comm.size() == 1) return;
    for (const Party& party : PartiesOf(comm)) {
      for (const AllreduceAmong allreduce : kAllreduces) {
        for (size_t count : kCounts) {
          if (!check::Full() && (count == 2 || count == 16)) continue;
          std::vector<float> data = Terms(comm.rank(), count), sums(count);
          for (size_t i = 0; i < count; ++i) {
            for (const int r : party.ranks) sums[i] += Term(r, i);
            sums[i] *= 0.5f;
          }
          const Finish finish{0.5, 1};
          EXPECT_EQ(allreduce(comm, party, DType::kFloat32, data.data(), count, finish).Report(),
                    "ok");
          EXPECT(data == sums);
        }
      }
    }
  });
}

// What rounds differently in different orders, NaN with different payloads among it, and a divisor
// that may be applied but once.
TEST(AllreducesOverChannelsEndWithTheSameBits) {
  OnEveryWorld([](Communicator& comm, Board& board) {
    if (comm.size() == 1) return;
    for (const AllreduceAmong allreduce : kAllreduces) {
      constexpr size_t kCount = 1001;
      for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
        std::mt19937 draw(static_cast<uint32_t>(comm.rank()) + 3);
        std::vector<uint16_t> data(kCount * SizeOf(dtype) / 2);
        for (uint16_t& half : data) half = static_cast<uint16_t>(draw());
        EXPECT(allreduce(comm, Everybody(comm), dtype, data.data(), kCount, Finish{0.3, 1}).ok());
        const std::string bytes(reinterpret_cast<const char*>(data.data()), data.size() * 2);
        for (const std::string& other : board.Gather(comm.rank(), bytes)) EXPECT(other == bytes);
      }
      std::vector<int32_t> whole(kCount, -7 * (comm.rank() + 1));
      const int64_t sum = int64_t{-7} * comm.size() * (comm.size() + 1) / 2;
      EXPECT(
          allreduce(comm, Everybody(comm), DType::kInt32, whole.data(), kCount, Finish{1, 3}).ok());
      EXPECT(whole == std::vector<int32_t>(kCount, static_cast<int32_t>(sum / 3)));
    }
  });
}

TEST(RingAllgatherTakesUnequalBlocks) {
  OnEveryWorld([](Communicator& comm, Board&) {
    std::vector<size_t> offsets = {0};
    for (int r = 0; r < comm.size(); ++r)
      offsets.push_back(offsets.back() + static_cast<size_t>(r == 1 ? 0 : 1000 * r + 1));
    std::string data(offsets.back(), '.');
    const auto begin = offsets[static_cast<size_t>(comm.rank())],
               end = offsets[static_cast<size_t>(comm.rank()) + 1];
    std::memset(data.data() + begin, 'a' + comm.rank(), end - begin);
    EXPECT_EQ(RingAllgather(comm, data.data(), offsets).Report(), "ok");
    for (int r = 0; r < comm.size(); ++r)
      for (size_t i = offsets[static_cast<size_t>(r)]; i < offsets[static_cast<size_t>(r) + 1]; ++i)
        if (data[i] != 'a' + r)
          return check::Fail(__FILE__, __LINE__, "block " + std::to_string(r));
  });
}

TEST(BroadcastsOverChannelsFromEveryRoot) {
  OnEveryWorld([](Communicator& comm, Board&) {
    if (comm.size() == 1) return;
    for (int root = 0; root < comm.size(); ++root) {
      for (size_t bytes : {size_t{0}, size_t{1}, size_t{1} << (check::PathsOnly() ? 18 : 20)}) {
        for (const bool tree : {false, true}) {
          std::string data(bytes, comm.rank() == root ? 'r' : '-');
          const Result sent = tree ? TreeBroadcast(comm, Everybody(comm), data.data(), bytes, root)
                                   : ChainBroadcast(comm, data.data(), bytes, root);
          EXPECT_EQ(sent.Report(), "ok");
          EXPECT(data == std::string(bytes, 'r'));
        }
      }
    }
  });
}

TEST(DisseminationAgreesOnBitsAndFlags) {
  OnEveryWorld([](Communicator& comm, Board&) {
    Dissemination dissemination(&comm);
    for (int cycle = 0; cycle < 20; ++cycle) {
      // Every rank clears one bit; every rank raises one flag.
      std::vector<uint64_t> bits(static_cast<size_t>(cycle % 3), ~uint64_t{0}), expected = bits;
      uint16_t flags = static_cast<uint16_t>(1 << comm.rank());
      for (size_t w = 0; w < bits.size(); ++w) {
        bits[w] &= ~(uint64_t{1} << (comm.rank() + cycle));
        for (int r = 0; r < comm.size(); ++r) expected[w] &= ~(uint64_t{1} << (r + cycle));
      }
      EXPECT_EQ(dissemination.Agree(&flags, &bits).Report(), "ok");
      EXPECT(bits == expected);
      EXPECT_EQ(int{flags}, (1 << comm.size()) - 1);
    }
  });
}

TEST(NoticesAgreeOnBitsFlagsAndOffers) {
  OnEveryWorld([](Communicator& comm, Board& board) {
    const int n = comm.size(), me = comm.rank();
    if (!Notices::Serve(comm, 192)) return;
    Notices notices(&comm);
    for (int cycle = 0; cycle < 200; ++cycle) {
      const auto words = static_cast<size_t>(cycle % 3);
      std::vector<uint64_t> bits(words, ~uint64_t{0}), expected = bits;
      auto flags = static_cast<uint16_t>(1 << me);
      for (size_t w = 0; w < words; ++w) {
        bits[w] &= ~(uint64_t{1} << ((me + cycle) % 64));
        for (int r = 0; r < n; ++r) expected[w] &= ~(uint64_t{1} << ((r + cycle) % 64));
      }
      // All offer the same, one offers nothing, one offers something else; of changing lengths.
      const int kind = cycle % 4;
      uint32_t offer = kind == 1 && me == cycle % n ? 0 : kind == 2 && me == cycle % n ? 8 : 7;
      const size_t length = kind == 0 ? 5 : Notices::kRoomBytes / (1 + static_cast<size_t>(cycle));
      std::memset(notices.room(words), cycle + me, length);
      EXPECT_EQ(notices.Agree(&flags, &bits, &offer).Report(), "ok");
      EXPECT(bits == expected);
      EXPECT_EQ(int{flags}, (1 << n) - 1);
      EXPECT_EQ(offer, kind == 1 || kind == 2 ? 0u : 7u);
      for (int r = 0; r < n; ++r) {
        const std::string data(notices.data(r, words), length);
        EXPECT(data == std::string(length, static_cast<char>(cycle + r)));
      }
    }
    EXPECT_EQ(notices.cycles(), uint64_t{200});
    // Whoever has told nothing sees that others have; not before.
    board.Barrier(me);
    EXPECT(!notices.PeerBegan());
    board.Barrier(me);
    std::vector<uint64_t> bits;
    uint16_t flags = 0;
    uint32_t offer = 0;
    if (me == 0)
      while (!notices.PeerBegan()) std::this_thread::yield();
    EXPECT_EQ(notices.Agree(&flags, &bits, &offer).Report(), "ok");
  });
}

TEST(RanksWhoseBitsDoNotFitANoticeAgreeByMessages) {
  OnEveryWorld([](Communicator& comm, Board&) {
    EXPECT(!Notices::Serve(comm, size_t{64} << 20));
    EXPECT_EQ(Notices::Serve(comm, 1024), comm.shares_memory() && comm.size() > 1);
  });
}

TEST(DisseminationGathersBytes) {
  OnEveryWorld([](Communicator& comm, Board&) {
    Dissemination dissemination(&comm);
    for (size_t length : {size_t{0}, size_t{3}, size_t{300000}}) {
      std::vector<std::string> all;
      const std::string own(length * static_cast<size_t>(comm.rank() + 1) / 2,
                            static_cast<char>('A' + comm.rank()));
      EXPECT_EQ(dissemination.Allgather(own, &all).Report(), "ok");
      EXPECT_EQ(all.size(), static_cast<size_t>(comm.size()));
      for (size_t r = 0; r < all.size(); ++r)
        EXPECT(all[r] == std::string(length * (r + 1) / 2, static_cast<char>('A' + r)));
    }
  });
}

TEST(StagedAllreduceSums) {
  OnEveryWorld([](Communicator& comm, Board&) {
    if (!comm.shares_memory()) return;
    for (size_t count : kCounts) {
      if (count == 0) continue;
      std::vector<float> data = Terms(comm.rank(), count), out(count);
      const Part apart = {data.data(), out.data(), count},
                 in_place = {data.data(), data.data(), count};
      EXPECT_EQ(StagedAllreduce(comm, DType::kFloat32, apart, Finish{}).Report(), "ok");
      EXPECT(out == Sums(comm.size(), count));
      EXPECT(data == Terms(comm.rank(), count));
      EXPECT_EQ(StagedAllreduce(comm, DType::kFloat32, in_place, Finish{0.25, 1}).Report(), "ok");
      EXPECT(data == Sums(comm.size(), count, 0.25));
    }
  });
}

TEST(OneShotAllreduceSumsSeveralTensors) {
  OnEveryWorld([](Communicator& comm, Board&) {
    if (!comm.shares_memory()) return;
    for (int turn = 0; turn < 10; ++turn) {
      std::vector<std::vector<float>> data;
      std::vector<Part> parts;
      for (size_t count : {size_t{1}, size_t{0}, size_t{33}, size_t{1001}}) {
        data.push_back(Terms(comm.rank(), count + static_cast<size_t>(turn)));
        parts.push_back({data.back().data(), data.back().data(), data.back().size()});
      }
      EXPECT_EQ(OneShotAllreduce(comm, DType::kFloat32, parts, Finish{}).Report(), "ok");
      for (const auto& tensor : data) EXPECT(tensor == Sums(comm.size(), tensor.size()));
    }
  });
}

TEST(InPlaceAllreduceSums) {
  OnEveryWorld([](Communicator& comm, Board& board) {
    if (!comm.shares_memory()) return;
    for (size_t count : {size_t{1}, size_t{17}, size_t{5001}}) {
      // Blocks of different offsets, as allocations on different ranks may have.
      char* gap = nullptr;
      char* block = nullptr;
      if (comm.rank() % 2 == 1) EXPECT(comm.own_arena().heap()->Allocate(192, &gap).ok());
      EXPECT(comm.own_arena().heap()->Allocate(count * 4, &block).ok());
      EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % 64, size_t{0});
      const std::vector<float> terms = Terms(comm.rank(), count);
      std::memcpy(block, terms.data(), count * 4);
      std::vector<int64_t> offsets;
      const auto own = comm.own_arena().heap()->OffsetOf(block, count * 4);
      for (const std::string& offset : board.Gather(comm.rank(), std::to_string(own)))
        offsets.push_back(std::stoll(offset));
      EXPECT_EQ(InPlaceAllreduce(comm, DType::kFloat32, offsets, count, Finish{}, Inputs::kWritten)
                    .Report(),
                "ok");
      EXPECT(std::memcmp(block, Sums(comm.size(), count).data(), count * 4) == 0);
      comm.own_arena().heap()->Free(block);
      if (gap != nullptr) comm.own_arena().heap()->Free(gap);
    }
  });
}

}  // namespace
}  // namespace sparkvod
