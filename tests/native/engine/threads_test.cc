// Worlds whose ranks are threads of one process: how they meet, and how many there can be.
#include <atomic>
#include <string>
#include <vector>

#include "native/base/clock.h"
#include "tests/native/world.h"

namespace sparkvod {
namespace {

using namespace check;  // NOLINT: a test of what check's worlds run

// A world of that many threads, in which every collective has been; returns how many descriptors it
// had when it stood.
int CheckWorldOf(int size, double seconds) {
  WorldOptions options;
  options.seconds = seconds;
  options.config.start_timeout = options.config.collective_timeout = seconds;
  options.config.arena_bytes = 4 << 20;
  std::atomic<int> open{0};
  const int before = OpenFiles();
  RunWorld(
      kInproc, size,
      [&](Engine& engine, int rank) {
        EXPECT_EQ(engine.topology().local_size, size);
        EXPECT_EQ(BarrierOf(engine, "all are here").Report(), "ok");
        if (rank == 0) open.store(OpenFiles() - before);
        for (const size_t count : {size_t{1}, size_t{5000}}) {
          for (int turn = 0; turn < 2; ++turn) {
            std::vector<double> data(count, rank + 1.0);
            const Request sum = AllreduceOf("sum" + std::to_string(count), DType::kFloat64,
                                            {static_cast<int64_t>(count)});
            EXPECT_EQ(Run(engine, sum, {{data.data(), data.data(), count}}).Report(), "ok");
            EXPECT(data == std::vector<double>(count, size * (size + 1) / 2.0));
          }
        }
        std::vector<float> got;
        std::vector<int64_t> rows;
        EXPECT_EQ(
            Gather(engine, "rows", rank % 3, 2, static_cast<float>(rank), &got, &rows).Report(),
            "ok");
        for (int r = 0; r < size; ++r) EXPECT_EQ(rows[static_cast<size_t>(r)], r % 3);
        EXPECT(got.empty() == (size == 1));
        if (!got.empty()) EXPECT_EQ(got.front(), 1.0f);
        EXPECT_EQ(BarrierOf(engine, "all have looked").Report(), "ok");
      },
      options);
  return open.load();
}

// Four a rank: two pollers and their bells. Neither peers nor their bells cost one.
TEST(AWorldOfThreadsHasFewDescriptors) {
  for (const int size : {2, 16, 64}) {
    if (PathsOnly() && size > 16) continue;
    EXPECT(CheckWorldOf(size, 100) <= 4 * size + 1);  // and the folder that is counted
  }
}

TEST(AWorldOfTwoHundredAndFiftySixThreads) {
  if (!Full()) return;
  EXPECT(MayOpenFiles(2048));
  EXPECT(CheckWorldOf(256, Patience()) <= 4 * 256 + 1);
}

// How a connect() of two threads ends on both, and how long it takes.
struct Ended {
  Result result[2];
  double seconds = 0;
};

Ended ConnectTwo(double start_timeout, const std::string& other_secret, bool other_stays) {
  Ended ended;
  const int64_t began = NowNs();
  RunThreads(2, [&](int rank, Board& board) {
    Config config = TestConfig();
    config.start_timeout = start_timeout;
    std::unique_ptr<Engine> engine;
    std::string endpoint;
    EXPECT(Engine::Create(config, &engine).ok() && engine->Listen(&endpoint).ok());
    const auto endpoints = board.Gather(rank, endpoint);
    if (rank == 1 && !other_stays) engine.reset();
    if (engine != nullptr)
      ended.result[rank] = engine->Connect(rank, endpoints, rank == 0 ? "right" : other_secret);
    board.Barrier(rank);
  });
  ended.seconds = 1e-9 * static_cast<double>(NowNs() - began);
  return ended;
}

TEST(ThreadsWithAnotherSecretDoNotMeet) {
  const Holdings holdings;
  const Ended ended = ConnectTwo(0.3, "wrong", true);
  for (int rank : {0, 1}) {
    EXPECT(ended.result[rank].code() == Code::kTimeout);
    EXPECT_CONTAINS(ended.result[rank].Report(), "within SPARKVOD_START_TIMEOUT; missing: rank " +
                                                     std::to_string(1 - rank) + " on ");
    EXPECT_CONTAINS(ended.result[rank].Report(), "it knows another secret, or other endpoints");
  }
  holdings.ExpectUnchanged(__FILE__, __LINE__);
}

TEST(AThreadThatLeftBeforeItsWorldIsNotWaitedFor) {
  const Holdings holdings;
  const Ended ended = ConnectTwo(50, "right", false);
  EXPECT(ended.result[0].code() == Code::kPeerLost);
  EXPECT_CONTAINS(ended.result[0].Report(), "left before all had connected");
  EXPECT_CONTAINS(ended.result[0].Report(), "rank 1 on ");
  EXPECT(ended.seconds < 5);
  holdings.ExpectUnchanged(__FILE__, __LINE__);
}

}  // namespace
}  // namespace sparkvod
