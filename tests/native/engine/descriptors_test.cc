// Worlds in which one rank runs out of descriptors, at each place where it needs one more.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "native/base/clock.h"
#include "native/transport/fd.h"
#include "tests/native/world.h"

namespace sparkvod {
namespace {

using namespace check;  // NOLINT: a test of what check's worlds run

constexpr size_t kMostSpare = 64;
constexpr double kSeconds = 1;

// For as long as it lives, this process may open `spare` descriptors more than it has.
class Starved {
 public:
  explicit Starved(size_t spare) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = std::min<rlim_t>(256, before_.rlim_max);
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
    // Also the numbers between those that are open.
    for (Fd fd(::dup(2)); fd.valid(); fd = Fd(::dup(2))) held_.push_back(std::move(fd));
    EXPECT(held_.size() > spare);
    for (size_t i = 0; i < spare; ++i) held_.pop_back();
  }
  ~Starved() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
  std::vector<Fd> held_;
};

// What nobody needs more descriptors for.
void GoOnStarved(Engine& engine) {
  const Starved starved(0);
  Request add = RequestOf("set", Collective::kAddSet, {});
  add.splits = {0};
  EXPECT_EQ(Run(engine, add, {}).Report(), "ok");
  std::vector<float> data(300000, 1);
  Request sum = AllreduceOf("x", DType::kFloat32, {300000});
  const std::vector<Part> parts = {{data.data(), data.data(), data.size()}};
  EXPECT_EQ(Run(engine, sum, parts).Report(), "ok");
  EXPECT_EQ(data.back(), static_cast<float>(engine.topology().size));
  sum.process_set = 1;
  if (engine.topology().rank == 0) EXPECT_EQ(Run(engine, sum, parts).Report(), "ok");
  const Result timeline = engine.StartTimeline("/tmp/sparkvod-never.json", false);
  EXPECT_CONTAINS(timeline.Report(), "ulimit -n");
}

// How it ended, and how long that took.
Result Join(Engine& engine, int rank, const std::vector<std::string>& endpoints, double* seconds) {
  const int64_t began = NowNs();
  Result result = engine.Connect(rank, endpoints, "the job's secret");
  // Who was connected before the other failed learns of it where it communicates.
  if (result.ok()) result = BarrierOf(engine, "first");
  *seconds = static_cast<double>(NowNs() - began) * 1e-9;
  return result;
}

// With no descriptor to spare, one, two, … until the world comes together.
void StarveUntilItJoins(const Kind& kind, int size, int starving, int64_t streams) {
  RunProcesses(size, [&](int rank, Board& board) {
    Config config = TestConfig();
    config.transport = kind.transport;
    config.tcp_streams = streams;
    bool joined = false;
    int told = 0;
    for (size_t spare = 0; !joined && spare < kMostSpare; ++spare) {
      const Holdings holdings;
      std::unique_ptr<Engine> engine;
      std::string endpoint, words;
      double seconds = 0;
      Result result;
      {
        std::unique_ptr<Starved> starved;
        if (rank == starving) starved = std::make_unique<Starved>(spare);
        EXPECT(Engine::Create(config, &engine).ok());
        result = engine->Listen(&endpoint);
        const std::vector<std::string> endpoints =
            board.Gather(rank, result.ok() ? endpoint : std::string());
        const bool listens = !endpoints[static_cast<size_t>(starving)].empty();
        if (listens) result = Join(*engine, rank, endpoints, &seconds);
        if (!listens && rank != starving) result = Result::Fail(Code::kPeerLost, "");
      }
      const std::vector<std::string> reports = board.Gather(rank, result.Report());
      joined = reports[static_cast<size_t>(starving)] == "ok";
      const std::string name = "rank " + std::to_string(starving) + " on ";
      if (joined) {
        EXPECT_EQ(result.Report(), "ok");
        GoOnStarved(*engine);
      } else if (rank == starving) {
        EXPECT(result.code() == Code::kSystem);
        EXPECT_CONTAINS(result.Report(), "Too many open files; this process may have ");
        EXPECT_CONTAINS(result.Report(), "ulimit -n");
        if (seconds > 0) EXPECT_CONTAINS(result.Report(), name);
      } else if (seconds > 0) {
        ++told;
        EXPECT(result.code() == Code::kPeerLost);
        EXPECT_CONTAINS(result.Report(), name);
        EXPECT_CONTAINS(result.Report(), "ulimit -n");
      }
      if (seconds > kSeconds)
        Fail(__FILE__, __LINE__,
             std::to_string(seconds) + " s with " + std::to_string(spare) +
                 " to spare: " + result.Report());
      board.Barrier(rank);  // nobody leaves while another still asks
      EXPECT_EQ(engine->Shutdown().Report(), "ok");
      engine.reset();
      holdings.ExpectUnchanged(__FILE__, __LINE__);
    }
    EXPECT(joined);
    EXPECT(rank == starving || told >= 5);
  });
}

TEST(DescriptorsThatRunOutAreToldToAll) {
  // UBSan needs descriptors itself, to find out what memory is readable.
  if (!CanFork() || kSanitized) return;
  for (const Kind& kind : {kShm, Kind{"tcp", true}})
    for (const int size : {2, 3})
      for (int starving = 0; starving < size; ++starving) {
        StarveUntilItJoins(kind, size, starving, 1);
        if (kind.transport == "tcp" && starving == 1) StarveUntilItJoins(kind, size, starving, 4);
      }
}

}  // namespace
}  // namespace sparkvod
