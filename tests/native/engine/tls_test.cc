// Worlds whose ranks talk to each other over encrypted connections.
#include <csignal>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "native/base/clock.h"
#include "tests/native/terms.h"
#include "tests/native/world.h"

namespace sparkvod {
namespace {

using namespace check;  // NOLINT: a test of what check's worlds run

WorldOptions Encrypted(int64_t streams = 1) {
  WorldOptions options;
  options.config.tls = true;
  options.config.tcp_streams = streams;
  return options;
}

// Each collective once, over `rows` rows for each rank.
void RunAll(Engine& engine, const std::string& name, size_t rows) {
  const int rank = engine.topology().rank;
  const auto size = static_cast<size_t>(engine.topology().size);
  const size_t count = rows * size;
  const auto shape = std::vector<int64_t>{static_cast<int64_t>(count)};
  std::vector<float> sums(count);
  for (size_t r = 0; r < size; ++r)
    for (size_t i = 0; i < count; ++i) sums[i] += Term(static_cast<int>(r), i);

  std::vector<float> data = Terms(rank, count);
  EXPECT_EQ(Run(engine, AllreduceOf(name + "a", DType::kFloat32, shape),
                {{data.data(), data.data(), count}})
                .Report(),
            "ok");
  EXPECT(data == sums);

  data = Terms(rank, count);
  Request broadcast = RequestOf(name + "b", Collective::kBroadcast, {{DType::kFloat32, shape}});
  broadcast.root = static_cast<int32_t>(size) - 1;
  EXPECT_EQ(Run(engine, broadcast, {{data.data(), data.data(), count}}).Report(), "ok");
  EXPECT(data == Terms(broadcast.root, count));

  data = Terms(rank, count);
  std::vector<float> share(rows);
  EXPECT_EQ(
      Run(engine, RequestOf(name + "r", Collective::kReducescatter, {{DType::kFloat32, shape}}),
          {{data.data(), share.data(), count}})
          .Report(),
      "ok");
  EXPECT(std::memcmp(share.data(), sums.data() + static_cast<size_t>(rank) * rows,
                     rows * sizeof(float)) == 0);

  std::vector<float> got;
  std::vector<int64_t> rows_of;
  EXPECT(Gather(engine, name + "g", static_cast<int64_t>(rows) * (rank + 1), 1,
                static_cast<float>(rank), &got, &rows_of)
             .ok());
  EXPECT_EQ(got.size(), rows * size * (size + 1) / 2);
  EXPECT_EQ(got.back(), static_cast<float>(size - 1));

  Request alltoall = RequestOf(name + "t", Collective::kAlltoall, {{DType::kFloat32, shape}});
  alltoall.splits.assign(size, static_cast<int64_t>(rows));
  int64_t handle = 0;
  std::shared_ptr<Operation> operation;
  EXPECT(engine.Submit(alltoall, {{data.data(), nullptr, count}}, false, &handle).ok());
  EXPECT(engine.Find(handle, &operation).ok());
  EXPECT_EQ(End(engine, handle).Report(), "ok");
  const auto* const taken = reinterpret_cast<const float*>(operation->outputs[0].memory->data());
  for (size_t r = 0; r < size; ++r)
    EXPECT_EQ(taken[(r + 1) * rows - 1],
              Term(static_cast<int>(r), (static_cast<size_t>(rank) + 1) * rows - 1));
  EXPECT_EQ(BarrierOf(engine, name + "c").Report(), "ok");
}

// All collectives; small ones, which are cycles' words too, and ones that fill every buffer on the
// way in both directions at once.
TEST(TlsCarriesEveryCollective) {
  if (!CanEncrypt()) return;
  for (const int size : {2, 3})
    for (const int64_t streams : {1, 3}) {
      if (streams == 3 && size == 3 && !Full()) continue;
      RunWorld(
          kTcp, size,
          [](Engine& engine, int) {
            for (const size_t rows :
                 {size_t{1}, size_t{1000}, static_cast<size_t>(PathsOnly() ? 100000 : 1500000)})
              for (int turn = 0; turn < 2; ++turn) RunAll(engine, std::to_string(rows) + ".", rows);
            EXPECT_EQ(Carried(engine, "allreduce/tls/").calls, uint64_t{6});
            EXPECT_EQ(Carried(engine, "allreduce/tcp/").calls, uint64_t{0});
          },
          Encrypted(streams));
    }
}

// Two of three ranks share memory; what goes to the other host is encrypted.
TEST(TlsIsBetweenHosts) {
  if (!CanEncrypt()) return;
  WorldOptions options = Encrypted();
  options.hosts = {"one", "one", "two"};
  RunWorld(kInproc, 3, [](Engine& engine, int) { RunAll(engine, "x", 70000); }, options);
}

// Killed while nothing goes on, and in the middle of large collectives at some moment.
TEST(TlsTellsOfADeath) {
  if (!CanFork() || !CanEncrypt()) return;
  for (const bool busy : {false, true}) {
    WorldOptions options = Encrypted();
    options.shutdown = false;
    options.killed = {1};
    RunWorld(
        Kind{"tcp", true}, 3,
        [busy](Engine& engine, int rank) {
          std::vector<float> data(2000000);
          const Request request = AllreduceOf("grad", DType::kFloat32, {2000000});
          const std::vector<Part> parts = {{data.data(), data.data(), data.size()}};
          EXPECT_EQ(Run(engine, request, parts).Report(), "ok");
          if (rank == 1) {
            int64_t handle = 0;
            if (busy) EXPECT(engine.Submit(request, parts, true, &handle).ok());
            std::this_thread::sleep_for(std::chrono::milliseconds(busy ? 5 : 100));
            ::raise(SIGKILL);
          }
          Result result;
          int64_t began = 0;
          const Deadline deadline = Deadline::After(20);
          while (result.ok() && !deadline.Passed()) {
            began = NowNs();
            result = Run(engine, request, parts);
          }
          EXPECT((NowNs() - began) * 1e-9 < 1.5);
          EXPECT(result.code() == Code::kPeerLost);
          EXPECT_CONTAINS(result.Report(), "rank 1");
        },
        options);
  }
}

TEST(TlsTellsWhyARankAborts) {
  if (!CanEncrypt()) return;
  WorldOptions options = Encrypted();
  options.shutdown = false;
  RunWorld(
      kTcp, 3,
      [](Engine& engine, int rank) {
        EXPECT_EQ(BarrierOf(engine, "before").Report(), "ok");
        if (rank == 1) return engine.Abort("ValueError: no such column");
        const Result result = BarrierOf(engine, "never");
        EXPECT(result.code() == Code::kPeerLost);
        EXPECT_CONTAINS(result.Report(), "rank 1");
        EXPECT_CONTAINS(result.Report(), "no such column");
      },
      options);
}

}  // namespace
}  // namespace sparkvod
