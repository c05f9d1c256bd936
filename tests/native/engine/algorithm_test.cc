// Algorithms by name: what a knob asks for carries the collective, where it applies, and all ranks
// must ask for the same.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "tests/native/world.h"

namespace sparkvod {
namespace {

using namespace check;  // NOLINT: a test of what check's worlds run

WorldOptions Asking(const std::string& allreduce, const std::string& broadcast) {
  WorldOptions options;
  options.config.allreduce_algorithm = allreduce;
  options.config.broadcast_algorithm = broadcast;
  return options;
}

// Averages of float16 whose sum float16 does not hold, sums, and a broadcast.
void CheckCollectives(Engine& engine) {
  const int size = engine.topology().size, rank = engine.topology().rank;
  for (const int64_t count : {1, 40000}) {
    const auto n = static_cast<size_t>(count);
    const std::string name = std::to_string(count);
    std::vector<uint16_t> halves(n, 0x7b00);  // 57344
    const Request average = AllreduceOf("h" + name, DType::kFloat16, {count}, ReduceOp::kAverage);
    EXPECT_EQ(Run(engine, average, {{halves.data(), halves.data(), n}}).Report(), "ok");
    EXPECT(std::all_of(halves.begin(), halves.end(),
                       [](uint16_t half) { return half >= 0x7af8 && half <= 0x7b08; }));
    std::vector<float> in(n, static_cast<float>(rank + 1)), out(n);
    const Request sum = AllreduceOf("f" + name, DType::kFloat32, {count});
    EXPECT_EQ(Run(engine, sum, {{in.data(), out.data(), n}}).Report(), "ok");
    EXPECT(out == std::vector<float>(n, static_cast<float>(size * (size + 1) / 2)));
    EXPECT(in == std::vector<float>(n, static_cast<float>(rank + 1)));
    Request broadcast;
    broadcast.name = "b" + name;
    broadcast.collective = Collective::kBroadcast;
    broadcast.root = size - 1;
    broadcast.entries.push_back({DType::kFloat32, {count}});
    EXPECT_EQ(Run(engine, broadcast, {{in.data(), in.data(), n}}).Report(), "ok");
    EXPECT(in == std::vector<float>(n, static_cast<float>(size)));
  }
}

TEST(AlgorithmsThatAreAskedForCarry) {
  const std::vector<std::pair<std::string, std::string>> wishes = {
      {"ring", "chain"}, {"halving-doubling", "tree"}, {"doubling", "auto"}, {"tree", "tree"}};
  for (const Kind& kind : Kinds()) {
    for (const auto& wish : wishes) {
      const std::string &allreduce = wish.first, &broadcast = wish.second;
      // Of processes one wish will do: to fork costs much under a sanitizer.
      if (!Full() && kind.processes && allreduce != "halving-doubling") continue;
      for (int size : {2, 3, 5, 8}) {
        const bool pairs = allreduce == "halving-doubling";
        if (!Full() && size > 3 && (kind.transport != kInproc.transport || !pairs)) continue;
        RunWorld(
            kind, size,
            [&](Engine& engine, int) {
              CheckCollectives(engine);
              const std::string way = "/" + kind.transport + "/";
              EXPECT_EQ(Carried(engine, "allreduce" + way + allreduce).calls, uint64_t{4});
              if (broadcast != "auto")
                EXPECT_EQ(Carried(engine, "broadcast" + way + broadcast).calls, uint64_t{2});
            },
            Asking(allreduce, broadcast));
      }
    }
  }
}

// On two hosts with two ranks each, and where one has more.
TEST(AlgorithmsThatAreAskedForCarryAcrossHosts) {
  for (const std::string layout : {"aabb", "aab", "abb"}) {
    for (const std::string allreduce : {"hierarchical", "direct", "halving-doubling", "ring"}) {
      WorldOptions options = Asking(allreduce, "auto");
      for (const char host : layout) options.hosts.emplace_back(1, host);
      const bool applies =
          allreduce != "direct" && (allreduce != "hierarchical" || layout == "aabb");
      RunWorld(
          kInproc, static_cast<int>(layout.size()),
          [&](Engine& engine, int) {
            CheckCollectives(engine);
            // A rank that is alone on its host knows nothing but TCP.
            const uint64_t calls = Carried(engine, "allreduce/inproc+tcp/" + allreduce).calls +
                                   Carried(engine, "allreduce/tcp/" + allreduce).calls;
            EXPECT_EQ(calls, uint64_t{applies ? 4u : 0u});
            EXPECT_EQ(Carried(engine, "allreduce/").calls, uint64_t{4});
          },
          options);
    }
  }
}

// Between the same ranks over several streams at once.
TEST(AlgorithmsRunOverSeveralStreams) {
  WorldOptions options = Asking("auto", "auto");
  options.config.tcp_streams = 4;
  RunWorld(
      kTcp, 3,
      [](Engine& engine, int rank) {
        CheckCollectives(engine);
        std::vector<float> data(3 << 20, static_cast<float>(rank));
        const Request sum = AllreduceOf("large", DType::kFloat32, {3 << 20});
        EXPECT_EQ(Run(engine, sum, {{data.data(), data.data(), data.size()}}).Report(), "ok");
        EXPECT(data == std::vector<float>(data.size(), 3.0f));
      },
      options);
}

TEST(AlgorithmsThatThereAreNotAreRefused) {
  Config config = TestConfig();
  config.allreduce_algorithm = "rings";
  std::unique_ptr<Engine> engine;
  const Result result = Engine::Create(config, &engine);
  EXPECT(result.code() == Code::kInvalid);
  EXPECT_CONTAINS(result.Report(), "SPARKVOD_ALLREDUCE_ALGORITHM='rings' was found, one of auto, ");
}

TEST(AlgorithmsMustBeTheSameOnAllRanks) {
  RunThreads(2, [](int rank, Board& board) {
    Config config = TestConfig();
    if (rank == 1) config.allreduce_algorithm = "tree";
    std::unique_ptr<Engine> engine;
    std::string endpoint;
    EXPECT(Engine::Create(config, &engine).ok() && engine->Listen(&endpoint).ok());
    const Result result = engine->Connect(rank, board.Gather(rank, endpoint), "secret");
    EXPECT(result.code() == Code::kInvalid);
    EXPECT_CONTAINS(result.Report(), "SPARKVOD_ALLREDUCE_ALGORITHM is ");
    EXPECT_CONTAINS(result.Report(), "tree on rank 1");
  });
}

}  // namespace
}  // namespace sparkvod
