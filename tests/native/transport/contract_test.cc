// The contract of all transports: the laws of native/transport/channel.h, over worlds made by the
// bootstrap. A new transport is one more line in Transports().
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "native/base/clock.h"
#include "native/transport/tcp/tcp_channel.h"
#include "tests/native/check.h"
#include "tests/native/transport/worlds.h"

namespace sparkvod {
namespace {

using check::Board;
using check::ConfigOf;
using check::ForEachTransport;
using check::Join;
using check::Transport;
using check::Transports;

// Sleeps until the driver's poller has news, as an engine does between attempts.
void SleepForNews(World& world) {
  ArenaHeader& header = world.arena->header();
  header.sleeper.store(kForMessage);
  world.driver.Sleep(50);
  header.sleeper.store(kAwake);
}

// Moves `out` to one peer and `in` from another at the same time, in pieces of random size.
void Exchange(World& world, int to, const std::string& out, int from, std::string* in,
              uint32_t seed) {
  std::mt19937 draw(seed);
  size_t sent = 0, received = 0;
  while (sent < out.size() || received < in->size()) {
    size_t moved = 0;
    if (sent < out.size()) {
      size_t n = 0;
      const size_t piece = std::min(out.size() - sent, size_t{1} + draw() % 300000);
      EXPECT_EQ(world.peers[to].channel->TrySend(out.data() + sent, piece, &n).Report(), "ok");
      sent += n;
      moved += n;
    }
    if (received < in->size()) {
      size_t n = 0;
      const size_t piece = std::min(in->size() - received, size_t{1} + draw() % 300000);
      EXPECT_EQ(world.peers[from].channel->TryRecv(in->data() + received, piece, &n).Report(),
                "ok");
      received += n;
      moved += n;
    }
    if (moved == 0) SleepForNews(world);
  }
}

std::string Pattern(size_t bytes, int rank) {
  std::string text(bytes, '\0');
  for (size_t i = 0; i < bytes; ++i)
    text[i] = static_cast<char>((i * 31 + static_cast<size_t>(rank) * 7 + i / 251) & 0xff);
  return text;
}

TEST(TransportMovesBytesCompleteAndInOrder) {
  for (int size : {2, 3, 5}) {
    ForEachTransport(size, [size](World& world, const Transport& transport, Board&) {
      const int rank = world.topology.rank, to = (rank + 1) % size, from = (rank + size - 1) % size;
      EXPECT_EQ(std::string(world.peers[to].channel->transport()), transport.name);
      for (size_t bytes :
           {size_t{0}, size_t{1}, size_t{4097}, size_t{3} << (check::PathsOnly() ? 18 : 20)}) {
        std::string in(bytes, '\0');
        Exchange(world, to, Pattern(bytes, rank), from, &in, static_cast<uint32_t>(rank + 1));
        EXPECT(in == Pattern(bytes, from));
      }
    });
  }
}

// Blocks that go over several connections in turn: bytes of any number, a word that begins at the
// end of one block and ends in the next, and wakes by whichever connection it is.
TEST(TransportOverSeveralStreamsKeepsTheOrder) {
  check::RunThreads(2, [](int rank, Board& board) {
    Config config = ConfigOf({"tcp", "tcp", false});
    config.tcp_streams = 3;
    const std::unique_ptr<World> world = Join(config, rank, board);
    if (world == nullptr) return;
    const int peer = 1 - rank;
    Channel& channel = *world->peers[static_cast<size_t>(peer)].channel;
    for (size_t bytes : {TcpChannel::kBlockBytes - 2, size_t{5}, size_t{5} << 20, size_t{1}}) {
      std::string in(bytes, '\0');
      if (bytes == 5) {
        size_t n = 0;
        EXPECT(channel.TrySend(Pattern(bytes, rank).data(), bytes, &n).ok());
        EXPECT_EQ(n, bytes);
        for (n = 0; n < bytes;) {
          EXPECT(channel.Peek(in.data(), bytes, &n).ok());
          if (n < bytes) SleepForNews(*world);
        }
        EXPECT(in == Pattern(bytes, peer));
        EXPECT(channel.TryRecv(in.data(), bytes, &n).ok());
        EXPECT_EQ(n, bytes);
        continue;
      }
      Exchange(*world, peer, Pattern(bytes, rank), peer, &in, static_cast<uint32_t>(rank + 1));
      EXPECT(in == Pattern(bytes, peer));
    }
    board.Barrier(rank);
  });
}

TEST(TransportNeverBlocks) {
  ForEachTransport(2, [](World& world, const Transport&, Board& board) {
    const int rank = world.topology.rank;
    Channel& channel = *world.peers[1 - rank].channel;
    char byte;
    size_t n = 1;
    EXPECT(channel.TryRecv(&byte, 1, &n).ok());
    EXPECT_EQ(n, size_t{0});
    EXPECT(channel.Peek(&byte, 1, &n).ok());
    EXPECT_EQ(n, size_t{0});
    EXPECT(channel.TrySend(nullptr, 0, &n).ok());
    EXPECT_EQ(n, size_t{0});
    board.Barrier(rank);
    // Rank 0 fills everything that there is on the way; rank 1 then takes it all.
    std::string chunk(1 << 16, 'x');
    uint64_t total = 0;
    if (rank == 0) {
      for (int idle = 0; idle < 3 && total < (uint64_t{1} << 30);) {
        EXPECT(channel.TrySend(chunk.data(), chunk.size(), &n).ok());
        total += n;
        idle = n == 0 ? idle + 1 : 0;
      }
      EXPECT(total < (uint64_t{1} << 30));
    }
    const std::string told = board.Gather(rank, std::to_string(total))[0];
    if (rank == 1) {
      uint64_t taken = 0;
      while (taken < std::stoull(told)) {
        EXPECT(channel.TryRecv(chunk.data(), chunk.size(), &n).ok());
        taken += n;
        if (n == 0) SleepForNews(world);
      }
    }
  });
}

TEST(TransportPeeksWithoutTaking) {
  ForEachTransport(2, [](World& world, const Transport&, Board&) {
    Channel& channel = *world.peers[1 - world.topology.rank].channel;
    const std::string out = "hello";
    size_t n = 0;
    EXPECT(channel.TrySend(out.data(), out.size(), &n).ok());
    EXPECT_EQ(n, out.size());
    char in[16];
    for (int look = 0; look < 2; ++look) {
      for (n = 0; n < out.size();) {
        EXPECT(channel.Peek(in, sizeof(in), &n).ok());
        if (n < out.size()) SleepForNews(world);
      }
      EXPECT(std::memcmp(in, out.data(), n) == 0);
    }
    EXPECT(channel.TryRecv(in, sizeof(in), &n).ok());
    EXPECT_EQ(std::string(in, n), out);
    EXPECT(channel.Peek(in, sizeof(in), &n).ok());
    EXPECT_EQ(n, size_t{0});
  });
}

// The sleeper wakes by the message itself: each sleep may last ten seconds, 200 turns must not.
TEST(TransportWakesASleeper) {
  ForEachTransport(2, [](World& world, const Transport&, Board&) {
    const int rank = world.topology.rank;
    Channel& channel = *world.peers[1 - rank].channel;
    const int64_t start = NowNs();
    char byte = 'b';
    size_t n = 0;
    for (int turn = 0; turn < 200; ++turn) {
      if (turn % 2 == rank) {
        EXPECT(channel.TrySend(&byte, 1, &n).ok());
        EXPECT_EQ(n, size_t{1});
        continue;
      }
      for (;;) {
        EXPECT(channel.TryRecv(&byte, 1, &n).ok());
        if (n == 1) break;
        ArenaHeader& header = world.arena->header();
        header.sleeper.store(kForMessage);
        EXPECT(channel.TryRecv(&byte, 1, &n).ok());
        if (n == 0) world.driver.Sleep(10000);
        header.sleeper.store(kAwake);
        if (n == 1) break;
      }
    }
    EXPECT((NowNs() - start) < int64_t{8} * 1000000000);
  });
}

bool WaitForDeparture(World& world, int peer, Departure* how) {
  const Deadline deadline = Deadline::After(5);
  while (!world.peers[peer].link->Left(how)) {
    if (deadline.Passed()) return false;
    SleepForNews(world);
  }
  return true;
}

TEST(TransportTellsWhyAPeerLeft) {
  ForEachTransport(3, [](World& world, const Transport&, Board& board) {
    const int rank = world.topology.rank;
    Departure how;
    if (rank == 1) {
      for (int peer : {0, 2})
        world.peers[peer].link->Leave({false, true, Code::kTimeout, "rank 7 was late"});
    } else {
      EXPECT(WaitForDeparture(world, 1, &how));
      EXPECT(!how.orderly);
      EXPECT(how.relayed);
      EXPECT(how.code == Code::kTimeout);
      EXPECT_EQ(how.cause, "rank 7 was late");
      EXPECT(!world.peers[2 - rank].link->Left(&how));
    }
    board.Barrier(rank);
    if (rank == 2) {
      world.peers[0].link->Leave({true, false, Code::kShutDown, "done"});
    } else if (rank == 0) {
      EXPECT(WaitForDeparture(world, 2, &how));
      EXPECT(how.orderly);
    }
  });
}

TEST(TransportTellsThatAProcessDied) {
  if (!check::CanFork()) return;
  for (const char* knob : {"shm", "tcp"}) {
    Transport transport = {knob, knob, true};
    check::RunProcesses(2,
                        [&](int rank, Board& board) {
                          const std::unique_ptr<World> world =
                              Join(ConfigOf(transport), rank, board);
                          if (world == nullptr) return;
                          board.Barrier(rank);
                          if (rank == 1) ::raise(SIGKILL);
                          Departure how;
                          EXPECT(WaitForDeparture(*world, 1, &how));
                          EXPECT(!how.orderly);
                          EXPECT(how.code == Code::kPeerLost);
                        },
                        {1});
  }
}

TEST(TransportLeavesNothingOpen) {
  const check::Holdings holdings;
  for (const Transport& transport : Transports()) {
    if (transport.by_processes) continue;
    check::RunThreads(3, [&](int rank, Board& board) {
      const std::unique_ptr<World> world = Join(ConfigOf(transport), rank, board);
      board.Barrier(rank);
    });
    holdings.ExpectUnchanged(__FILE__, __LINE__);
  }
}

}  // namespace
}  // namespace sparkvod
