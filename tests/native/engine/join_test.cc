// Join: ranks that have nothing more to do contribute the neutral element to what the others go on
// with.
#include <algorithm>
#include <string>
#include <vector>

#include "tests/native/world.h"

namespace sparkvod {
namespace {

using namespace check;  // NOLINT: a test of what check's worlds run

Result Join(Engine& engine, int32_t over, int* last) {
  Request request;
  request.name = "sparkvod.join";
  request.collective = Collective::kJoin;
  request.root = over;
  int64_t handle = 0;
  SPARKVOD_TRY(engine.Submit(request, {}, false, &handle));
  std::shared_ptr<Operation> operation;
  SPARKVOD_TRY(engine.Find(handle, &operation));
  const Result result = End(engine, handle);
  *last = operation->last_joined;
  return result;
}

// One step of the ranks `first` to size-1, the others having joined.
void Step(Engine& engine, int first, int64_t count, int32_t over) {
  const int rank = engine.topology().rank, size = engine.topology().size;
  const auto n = static_cast<size_t>(count);
  const auto mine = static_cast<float>(rank + 1);
  const auto active = static_cast<float>(size - first);
  float sum = 0, product = 1;
  for (int r = first; r < size; ++r) {
    sum += static_cast<float>(r + 1);
    product *= static_cast<float>(r + 1);
  }
  const std::string suffix = std::to_string(count);
  const auto expect = [&](ReduceOp op, double prescale, float expected) {
    std::vector<float> data(n, mine);
    Request request = AllreduceOf(NameOf(op) + suffix, DType::kFloat32, {count}, op);
    request.prescale = prescale;
    EXPECT_EQ(Run(engine, request, {{data.data(), data.data(), n}}).Report(), "ok");
    if (n > 0) EXPECT(std::abs(data[n - 1] - expected) < 1e-5f * std::abs(expected));
  };
  expect(ReduceOp::kSum, 1, sum);
  expect(ReduceOp::kAverage, 1, sum / (over == kOverActive ? active : static_cast<float>(size)));
  expect(ReduceOp::kMin, 2, 2 * static_cast<float>(first + 1));
  expect(ReduceOp::kMax, -1, -static_cast<float>(first + 1));
  if (size <= 8) expect(ReduceOp::kProduct, 1, product);
  std::vector<float> same(n, 2.0f);  // Adasum of equal vectors is that vector
  EXPECT_EQ(Run(engine, AllreduceOf("adasum" + suffix, DType::kFloat32, {count}, ReduceOp::kAdasum),
                {{same.data(), same.data(), n}})
                .Report(),
            "ok");
  if (n > 0) EXPECT(std::abs(same[n - 1] - 2) < 1e-5f);
  Request group = AllreduceOf("group" + suffix, DType::kFloat32, {count});
  group.entries.push_back({DType::kInt64, {3}});
  std::vector<float> floats(n, mine);
  std::vector<int64_t> whole(3, rank + 1);
  EXPECT_EQ(Run(engine, group, {{floats.data(), floats.data(), n}, {whole.data(), whole.data(), 3}})
                .Report(),
            "ok");
  EXPECT(floats == std::vector<float>(n, sum));
  EXPECT_EQ(whole[2], static_cast<int64_t>(sum));
  std::shared_ptr<Memory> memory;  // in engine memory, where not all have it
  EXPECT(engine.Allocate(n * sizeof(float) + 1, &memory).ok());
  auto* engine_data = reinterpret_cast<float*>(memory->data());
  std::fill(engine_data, engine_data + n, mine);
  EXPECT_EQ(Run(engine, AllreduceOf("engine" + suffix, DType::kFloat32, {count}),
                {{engine_data, engine_data, n}})
                .Report(),
            "ok");
  if (n > 0) EXPECT_EQ(engine_data[n - 1], sum);

  std::vector<float> got;
  std::vector<int64_t> rows;
  EXPECT_EQ(Gather(engine, "gather" + suffix, count, 2, mine, &got, &rows).Report(), "ok");
  for (int r = 0; r < size; ++r) EXPECT_EQ(rows[static_cast<size_t>(r)], r < first ? 0 : count);
  if (n > 0) EXPECT_EQ(got[0], static_cast<float>(first + 1));

  const auto own =
      static_cast<size_t>(FirstRow(count, rank + 1, size) - FirstRow(count, rank, size));
  std::vector<float> data(n, mine), out(own);
  const Request scatter =
      RequestOf("scatter" + suffix, Collective::kReducescatter, {{DType::kFloat32, {count}}});
  EXPECT_EQ(Run(engine, scatter, {{data.data(), out.data(), n}}).Report(), "ok");
  EXPECT(out == std::vector<float>(own, sum));
  Request mean = scatter;
  mean.name = "mean" + suffix;
  mean.op = ReduceOp::kAverage;
  EXPECT_EQ(Run(engine, mean, {{data.data(), out.data(), n}}).Report(), "ok");
  const float divisor = over == kOverActive ? active : static_cast<float>(size);
  if (own > 0) EXPECT(std::abs(out[0] - sum / divisor) < 1e-5f * sum);

  Request spread =
      RequestOf("spread" + suffix, Collective::kBroadcast, {{DType::kFloat32, {count}}});
  spread.root = size - 1;
  EXPECT_EQ(Run(engine, spread, {{data.data(), data.data(), n}}).Report(), "ok");
  EXPECT(data == std::vector<float>(n, static_cast<float>(size)));

  Request all =
      RequestOf("all" + suffix, Collective::kAlltoall, {{DType::kFloat32, {count * size}}});
  all.splits.assign(static_cast<size_t>(size), count);
  std::fill_n(all.splits.begin(), first, 0);
  data.assign(n * static_cast<size_t>(size), mine);
  EXPECT_EQ(Run(engine, all, {{data.data(), nullptr, data.size()}}).Report(), "ok");
  EXPECT_EQ(BarrierOf(engine, "barrier").Report(), "ok");
}

// Rank r makes r+1 rounds and joins, so the last rank makes the last round alone.
void JoinInTurn(Engine& engine, int32_t over, int64_t count) {
  const int rank = engine.topology().rank, size = engine.topology().size;
  for (int round = 0; round <= rank; ++round)
    for (int turn = 0; turn < 2; ++turn) Step(engine, round, count, over);
  int last = -1;
  EXPECT_EQ(Join(engine, over, &last).Report(), "ok");
  EXPECT_EQ(last, size - 1);
}

TEST(JoinedRanksContributeTheNeutralElement) {
  for (const Kind& kind : Kinds())
    for (int size : Full() ? std::vector<int>{1, 2, 3, 5, 8} : std::vector<int>{1, 2, 3})
      RunWorld(kind, size, [](Engine& engine, int) {
        for (int64_t count : {0, 5, 30000})
          for (int32_t over : {kOverAll, kOverActive})
            if (count > 0 || over == kOverAll) JoinInTurn(engine, over, count);
        Step(engine, 0, 5, kOverAll);  // as if nobody had ever joined
      });
}

// Each of the last rounds has fewer ranks left.
TEST(JoinOfSixtyFourRanks) {
  if (!Full()) return;
  RunWorld(kInproc, 64, [](Engine& engine, int rank) {
    for (const int first : {0, 1, 33, 60}) {
      if (rank < first) break;
      for (int turn = 0; turn < 2; ++turn) Step(engine, first, 7, kOverAll);
    }
    int last = -1;
    EXPECT_EQ(Join(engine, kOverAll, &last).Report(), "ok");
    EXPECT(last >= 0 && last < 64);
  });
}

TEST(JoinOverSeveralHosts) {
  for (const std::string layout : {"aabb", "aab"}) {
    WorldOptions options;
    for (const char host : layout) options.hosts.emplace_back(1, host);
    RunWorld(
        kInproc, static_cast<int>(layout.size()),
        [](Engine& engine, int) { JoinInTurn(engine, kOverAll, 30000); }, options);
  }
}

// What a rank submits before it joins is its own, also when only its bit spoke of it.
TEST(JoinKeepsWhatWasSubmittedBefore) {
  for (const Kind& kind : {kInproc, kTcp})
    RunWorld(kind, 3, [](Engine& engine, int rank) {
      for (int turn = 0; turn < 4; ++turn) {
        std::vector<float> a(3, 1.0f), b(3, 1.0f);
        const int64_t first = Start(engine, AllreduceOf("a", DType::kFloat32, {3}), a.data());
        const int64_t second = Start(engine, AllreduceOf("b", DType::kFloat32, {3}), b.data());
        if (rank != 1) {
          std::vector<float> c(3, 1.0f);
          EXPECT_EQ(
              End(engine, Start(engine, AllreduceOf("c", DType::kFloat32, {3}), c.data())).Report(),
              "ok");
          EXPECT_EQ(c[0], 2.0f);
        }
        int last = 0;
        EXPECT_EQ(Join(engine, kOverAll, &last).Report(), "ok");
        EXPECT_EQ(End(engine, first).Report(), "ok");
        EXPECT_EQ(End(engine, second).Report(), "ok");
        EXPECT(a == std::vector<float>(3, 3.0f));
        EXPECT(b == std::vector<float>(3, 3.0f));
      }
    });
}

TEST(JoinOfEveryDtype) {
  for (const Kind& kind : {kInproc, kTcp})
    RunWorld(kind, 3, [](Engine& engine, int rank) {
      if (rank > 0)
        for (int code = 0; code < kDTypeCount; ++code)
          for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
            const auto dtype = static_cast<DType>(code);
            // The element with the bits 1, which is small in every dtype, and positive.
            std::vector<uint8_t> one(SizeOf(dtype) * 9);
            for (size_t i = 0; i < one.size(); i += SizeOf(dtype)) one[i] = 1;
            std::vector<uint8_t> data = one;
            const Request request =
                AllreduceOf(std::string(NameOf(dtype)) + NameOf(op), dtype, {9}, op);
            EXPECT_EQ(Run(engine, request, {{data.data(), data.data(), 9}}).Report(), "ok");
            // Two ranks are left; the sum of two such floats has the bits 2.
            if (op == ReduceOp::kSum && dtype != DType::kBool)
              for (size_t i = 0; i < one.size(); i += SizeOf(dtype)) one[i] = 2;
            if (op != ReduceOp::kProduct || !IsFloating(dtype)) EXPECT(data == one);
          }
      int last = 0;
      EXPECT_EQ(Join(engine, kOverAll, &last).Report(), "ok");
    });
}

// What cannot be done without a joined rank fails on all others, naming it, and nothing else does.
TEST(JoinedRanksAreNamedWhereTheyAreNeeded) {
  for (const Kind& kind : Kinds())
    RunWorld(kind, 3, [](Engine& engine, int rank) {
      std::vector<float> data(9, static_cast<float>(rank));
      Request spread = RequestOf("spread", Collective::kBroadcast, {{DType::kFloat32, {9}}});
      spread.root = 1;
      EXPECT_EQ(Run(engine, spread, {{data.data(), data.data(), 9}}).Report(), "ok");  // cached
      if (rank != 1) {
        for (int turn = 0; turn < 2; ++turn) {
          Result result = Run(engine, spread, {{data.data(), data.data(), 9}});
          EXPECT(result.code() == Code::kMismatch);
          EXPECT_CONTAINS(result.Report(), "root 1, but rank 1 has joined");
          result = Run(engine, RequestOf("all", Collective::kAlltoall, {{DType::kFloat32, {9}}}),
                       {{data.data(), nullptr, 9}});
          EXPECT(result.code() == Code::kMismatch);
          EXPECT_CONTAINS(result.Report(), "sends 3 rows to rank 1, but rank 1 has joined");
          EXPECT_EQ(
              Run(engine, AllreduceOf("sum", DType::kFloat32, {9}), {{data.data(), data.data(), 9}})
                  .Report(),
              "ok");
        }
        // Who has joined has sent nothing, so that a disagreement is of the others alone.
        const int64_t rows = rank == 0 ? 9 : 8;
        const Result odd = Run(engine, AllreduceOf("odd", DType::kFloat32, {rows}),
                               {{data.data(), data.data(), static_cast<size_t>(rows)}});
        EXPECT_CONTAINS(odd.Report(), "rank 0 sent allreduce (sum) of float32 [9], rank 2 sent");
        Request add;
        add.name = "sparkvod.add_process_set";
        add.collective = Collective::kAddSet;
        add.splits = {0, 2};
        EXPECT_CONTAINS(Run(engine, add, {}).Report(), "needs all ranks, but rank 1 has joined");
      }
      int last = 0;
      const Result joined = Join(engine, rank == 0 ? kOverActive : kOverAll, &last);
      EXPECT(joined.code() == Code::kMismatch);
      EXPECT_CONTAINS(joined.Report(), "rank 0 sent join (averages over active ranks)");
      EXPECT_EQ(Join(engine, kOverAll, &last).Report(), "ok");
    });
}

// A rank that joined waits for as long as the others go on, and no longer.
TEST(JoinWaitsWhileTheOthersGoOn) {
  WorldOptions options;
  options.config.collective_timeout = 1;
  options.shutdown = false;
  RunWorld(
      kInproc, 2,
      [](Engine& engine, int rank) {
        std::vector<float> data(9);
        for (int turn = 0; rank == 0 && turn < 15; ++turn) {
          EXPECT_EQ(End(engine, Start(engine, AllreduceOf("a", DType::kFloat32, {9}), data.data()))
                        .Report(),
                    "ok");
          std::this_thread::sleep_for(std::chrono::milliseconds(100));
        }
        int last = 0;
        if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1600));
        const Result result = rank == 1 ? Join(engine, kOverAll, &last) : Result();
        if (rank == 1) {
          EXPECT(result.code() == Code::kTimeout);
          EXPECT_CONTAINS(result.Report(), "join was not called by rank 0");
        }
      },
      options);
}

}  // namespace
}  // namespace sparkvod
