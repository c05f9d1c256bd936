// Collectives among some of the ranks: overlapping sets, several in flight, added and removed.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "tests/native/world.h"

namespace sparkvod {
namespace {

using namespace check;  // NOLINT: a test of what check's worlds run

Result Add(Engine& engine, const std::vector<int64_t>& ranks, int32_t* id) {
  Request request;
  request.name = "sparkvod.add_process_set";
  request.collective = Collective::kAddSet;
  request.splits = ranks;
  int64_t handle = 0;
  SPARKVOD_TRY(engine.Submit(request, {}, false, &handle));
  std::shared_ptr<Operation> operation;
  SPARKVOD_TRY(engine.Find(handle, &operation));
  const Result result = End(engine, handle);
  if (operation->set != nullptr) *id = operation->set->id;
  return result;
}

Result Remove(Engine& engine, int32_t id) {
  Request request;
  request.name = "sparkvod.remove_process_set";
  request.collective = Collective::kRemoveSet;
  request.root = id;
  return Run(engine, request, {});
}

bool In(const std::vector<int64_t>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

Request Of(int32_t set, Request request) {
  request.process_set = set;
  return request;
}

// Behind which page's first line a row of such numbers lies, or null.
const char* FindIn(const char* memory, size_t bytes, float number) {
  const std::vector<float> row(8, number);
  for (const char* at = memory + kCacheLine; at < memory + bytes; at += kPage)
    if (std::memcmp(at, row.data(), row.size() * sizeof number) == 0) return at;
  return nullptr;
}

// Every collective once, of a set that this rank is in.
void CheckSet(Engine& engine, int32_t set, const std::vector<int64_t>& ranks, int64_t count) {
  const int rank = engine.topology().rank;
  const auto n = static_cast<size_t>(count), size = ranks.size();
  const auto place =
      static_cast<size_t>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  const auto mine = static_cast<float>(rank + 1);
  float sum = 0;
  for (const int64_t r : ranks) sum += static_cast<float>(r + 1);
  const std::string suffix = std::to_string(count);

  std::vector<float> data(n, mine);
  EXPECT_EQ(Run(engine, Of(set, AllreduceOf("sum" + suffix, DType::kFloat32, {count})),
                {{data.data(), data.data(), n}})
                .Report(),
            "ok");
  EXPECT(data == std::vector<float>(n, sum));
  data.assign(n, mine);
  EXPECT_EQ(Run(engine,
                Of(set, AllreduceOf("mean" + suffix, DType::kFloat32, {count}, ReduceOp::kAverage)),
                {{data.data(), data.data(), n}})
                .Report(),
            "ok");
  EXPECT(std::abs(data[0] - sum / static_cast<float>(size)) < 1e-5f);
  std::shared_ptr<Memory> memory;
  EXPECT(engine.Allocate(n * sizeof(float), &memory).ok());
  auto* engine_data = reinterpret_cast<float*>(memory->data());
  std::fill(engine_data, engine_data + n, mine);
  EXPECT_EQ(Run(engine, Of(set, AllreduceOf("engine" + suffix, DType::kFloat32, {count})),
                {{engine_data, engine_data, n}})
                .Report(),
            "ok");
  EXPECT_EQ(engine_data[n - 1], sum);

  const auto own =
      static_cast<size_t>(FirstRow(count, static_cast<int>(place) + 1, static_cast<int>(size)) -
                          FirstRow(count, static_cast<int>(place), static_cast<int>(size)));
  std::vector<float> in(n, mine), out(own);
  EXPECT_EQ(Run(engine,
                Of(set, RequestOf("scatter" + suffix, Collective::kReducescatter,
                                  {{DType::kFloat32, {count}}})),
                {{in.data(), out.data(), n}})
                .Report(),
            "ok");
  EXPECT(out == std::vector<float>(own, sum));

  Request spread =
      Of(set, RequestOf("spread" + suffix, Collective::kBroadcast, {{DType::kFloat32, {count}}}));
  spread.root = static_cast<int32_t>(ranks.back());
  EXPECT_EQ(Run(engine, spread, {{in.data(), in.data(), n}}).Report(), "ok");
  EXPECT(in == std::vector<float>(n, static_cast<float>(ranks.back() + 1)));

  for (const Collective collective : {Collective::kAllgather, Collective::kAlltoall}) {
    const bool all = collective == Collective::kAlltoall;
    const auto rows = all ? count * static_cast<int64_t>(size) : count;
    const std::vector<float> given(static_cast<size_t>(rows), mine);
    int64_t handle = 0;
    std::shared_ptr<Operation> operation;
    EXPECT(engine
               .Submit(Of(set, RequestOf(NameOf(collective) + suffix, collective,
                                         {{DType::kFloat32, {rows}}})),
                       {{given.data(), nullptr, given.size()}}, false, &handle)
               .ok());
    if (!engine.Find(handle, &operation).ok()) return Fail(__FILE__, __LINE__, "no handle");
    EXPECT_EQ(End(engine, handle).Report(), "ok");
    if (operation->outputs.size() != 1) return Fail(__FILE__, __LINE__, "no output");
    EXPECT_EQ(operation->outputs[0].rows.size(), size);
    for (const int64_t r : operation->outputs[0].rows) EXPECT_EQ(r, count);
    const auto* got = reinterpret_cast<const float*>(operation->outputs[0].memory->data());
    for (size_t r = 0; r < size; ++r) EXPECT_EQ(got[r * n], static_cast<float>(ranks[r] + 1));
  }
  Request barrier;
  barrier.name = "barrier";
  barrier.collective = Collective::kBarrier;
  EXPECT_EQ(Run(engine, Of(set, barrier), {}).Report(), "ok");
}

TEST(ProcessSetsOverlap) {
  for (const Kind& kind : Kinds())
    for (int size : {3, 5})
      RunWorld(kind, size, [size](Engine& engine, int rank) {
        const std::vector<std::vector<int64_t>> sets = {{0, 1}, {1, 2}, {0, size - 1}, {2}};
        std::vector<int32_t> ids;
        for (const auto& ranks : sets) {
          int32_t id = 0;
          EXPECT_EQ(Add(engine, ranks, &id).Report(), "ok");
          ids.push_back(id);
        }
        for (int turn = 0; turn < 3; ++turn)
          for (int64_t count : {7, 40000})
            for (size_t s = 0; s < sets.size(); ++s)
              if (In(sets[s], rank)) CheckSet(engine, ids[s], sets[s], count);
        std::vector<int64_t> world;
        for (int r = 0; r < size; ++r) world.push_back(r);
        CheckSet(engine, 0, world, 40000);
        for (const int32_t id : ids) EXPECT_EQ(Remove(engine, id).Report(), "ok");
        CheckSet(engine, 0, world, 7);
      });
}

// One tensor of every set, and of the world, under one name, all at once and in another order on
// every rank.
TEST(ProcessSetsInFlight) {
  for (const Kind& kind : Kinds())
    RunWorld(kind, 5, [](Engine& engine, int rank) {
      const std::vector<std::vector<int64_t>> sets = {{0, 1, 2, 3, 4}, {0, 1}, {1, 2},   {2, 3},
                                                      {3, 4},          {0, 4}, {0, 2, 4}};
      std::vector<int32_t> ids(1);
      for (size_t s = 1; s < sets.size(); ++s) {
        int32_t id = 0;
        EXPECT_EQ(Add(engine, sets[s], &id).Report(), "ok");
        ids.push_back(id);
      }
      for (int turn = 0; turn < 20; ++turn) {
        const int64_t count = turn % 2 == 0 ? 9 : 20000;
        std::vector<std::vector<float>> data(sets.size());
        std::vector<int64_t> handles(sets.size());
        for (size_t i = 0; i < sets.size(); ++i) {
          const size_t s = (i + static_cast<size_t>(rank)) % sets.size();
          if (!In(sets[s], rank)) continue;
          data[s].assign(static_cast<size_t>(count), static_cast<float>(rank + 1));
          handles[s] =
              Start(engine,
                    Of(ids[s], AllreduceOf("x" + std::to_string(count), DType::kFloat32, {count})),
                    data[s].data());
        }
        for (size_t s = 0; s < sets.size(); ++s) {
          if (!In(sets[s], rank)) continue;
          float sum = 0;
          for (const int64_t r : sets[s]) sum += static_cast<float>(r + 1);
          EXPECT_EQ(End(engine, handles[s]).Report(), "ok");
          EXPECT(data[s] == std::vector<float>(data[s].size(), sum));
        }
      }
      EXPECT(engine.GetStats().cache_hits > 0);
    });
}

// What two ranks agree on beside a small tensor of the world the third knows nothing of. Of two
// tensors that take turns in a cache of one the world's is one bit, and the set's is said in full.
TEST(ProcessSetsBesideASmallTensorOfTheWorld) {
  WorldOptions options;
  options.config.cache_capacity = 1;
  for (const Kind& kind : Kinds())
    RunWorld(
        kind, 3,
        [](Engine& engine, int rank) {
          int32_t id = 0;
          EXPECT_EQ(Add(engine, {0, 1}, &id).Report(), "ok");
          for (int turn = 0; turn < 50; ++turn) {
            std::vector<float> pair(9, 1.0f), all(9, static_cast<float>(turn));
            const Request of_all = AllreduceOf("all", DType::kFloat32, {9});
            EXPECT_EQ(Run(engine, of_all, {{all.data(), all.data(), 9}}).Report(), "ok");
            EXPECT(all == std::vector<float>(9, 3.0f * static_cast<float>(turn)));
            all.assign(9, static_cast<float>(turn + rank));
            int64_t of_pair = 0;
            if (rank != 2)
              EXPECT(engine
                         .Submit(Of(id, AllreduceOf("pair", DType::kFloat32, {9})),
                                 {{pair.data(), pair.data(), 9}}, false, &of_pair)
                         .ok());
            EXPECT_EQ(Run(engine, of_all, {{all.data(), all.data(), 9}}).Report(), "ok");
            EXPECT(all == std::vector<float>(9, 3.0f * static_cast<float>(turn + 1)));
            if (rank == 2) continue;
            EXPECT_EQ(End(engine, of_pair).Report(), "ok");
            EXPECT(pair == std::vector<float>(9, 2.0f));
          }
        },
        options);
}

TEST(ProcessSetsOverSeveralHosts) {
  const std::string layout = "aabbcc";
  WorldOptions options;
  for (const char host : layout) options.hosts.emplace_back(1, host);
  RunWorld(
      kInproc, 6,
      [](Engine& engine, int rank) {
        const std::vector<std::vector<int64_t>> sets = {{0, 1}, {0, 1, 2, 3}, {1, 3, 5}, {0, 1, 2}};
        for (const std::vector<int64_t>& ranks : sets) {
          int32_t id = 0;
          EXPECT_EQ(Add(engine, ranks, &id).Report(), "ok");
          if (In(ranks, rank)) CheckSet(engine, id, ranks, 30000);
          EXPECT_EQ(Remove(engine, id).Report(), "ok");
        }
      },
      options);
}

TEST(ProcessSetsComeAndGo) {
  RunWorld(kInproc, 3, [](Engine& engine, int rank) {
    const std::vector<std::vector<int64_t>> sets = {{0, 2}, {1, 2}};
    for (int turn = 0; turn < 300; ++turn) {
      const std::vector<int64_t>& ranks = sets[static_cast<size_t>(turn % 2)];
      int32_t id = 0;
      EXPECT_EQ(Add(engine, ranks, &id).Report(), "ok");
      EXPECT_EQ(id, turn + 1);
      std::vector<float> data(3, 1.0f);
      if (In(ranks, rank)) {
        EXPECT_EQ(Run(engine, Of(id, AllreduceOf("x", DType::kFloat32, {3})),
                      {{data.data(), data.data(), 3}})
                      .Report(),
                  "ok");
        EXPECT_EQ(data[0], 2.0f);
      }
      EXPECT_EQ(Remove(engine, id).Report(), "ok");
    }
  });
}

// Whoever is late reads there what a rank published last before it left.
TEST(WhatASetPublishedLastStaysWhenARankHasLeft) {
  WorldOptions options;
  options.config.arena_bytes = 256 << 20;
  options.config.staging_bytes = 16 << 20;  // more in all than a heap keeps of what was freed
  options.shutdown = false;
  std::shared_ptr<Memory> first;
  const char* begin = nullptr;
  RunWorld(
      kInproc, 4,
      [&](Engine& engine, int rank) {
        if (rank == 0) EXPECT(engine.Allocate(2 << 20, &first).ok());
        std::vector<float> data(1000, 1234.5f);
        const std::vector<std::vector<int64_t>> sets = {{0, 2},    {0, 3}, {0, 1, 2},
                                                        {0, 1, 3}, {0},    {0, 1}};
        for (const auto& ranks : sets) {
          int32_t id = 0;
          EXPECT_EQ(Add(engine, ranks, &id).Report(), "ok");
          if (ranks != sets.back() || rank > 1) continue;
          const Request sum = Of(id, AllreduceOf("x", DType::kFloat32, {1000}));
          EXPECT_EQ(Run(engine, sum, {{data.data(), data.data(), data.size()}}).Report(), "ok");
        }
        EXPECT_EQ(BarrierOf(engine, "end").Report(), "ok");
        if (rank == 0) begin = FindIn(first->data(), 128 << 20, 1234.5f);
        EXPECT_EQ(engine.Shutdown().Report(), "ok");
      },
      options);
  // The engines are gone.
  EXPECT(begin != nullptr);
  if (begin == nullptr) return;
  float found = 0;
  std::memcpy(&found, begin, sizeof found);
  EXPECT_EQ(found, 1234.5f);
}

TEST(ProcessSetsRefuseMistakes) {
  for (const Kind& kind : {kInproc, kTcp})
    RunWorld(kind, 3, [](Engine& engine, int rank) {
      int32_t id = 0, again = 0;
      EXPECT_EQ(Add(engine, {0, 2}, &id).Report(), "ok");
      EXPECT_CONTAINS(Add(engine, {0, 2}, &again).Report(),
                      "process set 1 has the ranks [0,2] already");
      EXPECT_CONTAINS(Add(engine, {0, 1, 2}, &again).Report(), "process set 0 has the ranks");
      EXPECT_CONTAINS(Add(engine, {0, 3}, &again).Report(), "a process set with rank 3");
      EXPECT_CONTAINS(Add(engine, {}, &again).Report(), "without ranks");
      EXPECT_CONTAINS(Add(engine, {0, rank == 1 ? 2 : 1}, &again).Report(),
                      "rank 1 sent add_process_set of ranks [0,2]");
      EXPECT_CONTAINS(Remove(engine, 7).Report(), "process set 7 is not there");
      EXPECT_CONTAINS(Remove(engine, 0).Report(), "process set 0 is not there, or is the global");
      std::vector<float> data(6);
      const std::vector<Part> parts = {{data.data(), data.data(), 3}};
      Request sum = Of(id, AllreduceOf("x", DType::kFloat32, {3}));
      if (rank == 1) {
        EXPECT_CONTAINS(Run(engine, sum, parts).Report(),
                        "of the ranks [0,2], of which this rank is none");
      } else {
        Request odd = sum;
        odd.entries[0].shape = {1, 3};
        const Result result = Run(engine, rank == 2 ? odd : sum, parts);
        EXPECT(result.code() == Code::kMismatch);
        EXPECT_CONTAINS(result.Report(),
                        "rank 0 sent allreduce (sum) in process set 1 of float32 [3]");
        EXPECT_CONTAINS(result.Report(), "rank 2 sent");
        Request spread = Of(id, RequestOf("b", Collective::kBroadcast, {{DType::kFloat32, {3}}}));
        spread.root = 1;
        EXPECT_CONTAINS(Run(engine, spread, parts).Report(), "one of the ranks [0,2] was expected");
      }
      sum.process_set = 9;
      EXPECT_CONTAINS(Run(engine, sum, parts).Report(), "process set 9, which was not added");
      // What waits in a set that is removed ends.
      int64_t handle = 0;
      sum.process_set = id;
      if (rank == 0) handle = Start(engine, sum, data.data());
      EXPECT_EQ(Remove(engine, id).Report(), "ok");
      if (rank == 0)
        EXPECT_CONTAINS(End(engine, handle).Report(), "process set 1 was removed while 'x'");
      EXPECT_EQ(BarrierOf(engine, "end").Report(), "ok");
    });
}

// Ranks that have joined are absent from the sets that they are in as well.
TEST(ProcessSetsWithJoinedRanks) {
  for (const Kind& kind : {kInproc, kTcp})
    RunWorld(kind, 3, [](Engine& engine, int rank) {
      int32_t first = 0, second = 0;
      EXPECT_EQ(Add(engine, {0, 2}, &first).Report(), "ok");
      EXPECT_EQ(Add(engine, {0}, &second).Report(), "ok");
      for (int turn = 0; turn < 3; ++turn) {
        std::vector<float> data(3, 1.0f);
        const std::vector<Part> parts = {{data.data(), data.data(), 3}};
        if (rank == 0)
          EXPECT_EQ(Run(engine, Of(second, AllreduceOf("x", DType::kFloat32, {3})), parts).Report(),
                    "ok");
        for (int step = 0; rank == 2 && step < 3; ++step) {
          data.assign(3, 1.0f);
          EXPECT_EQ(Run(engine, Of(first, AllreduceOf("x", DType::kFloat32, {3})), parts).Report(),
                    "ok");
          EXPECT_EQ(data[0], 1.0f);
        }
        Request join;
        join.name = "sparkvod.join";
        join.collective = Collective::kJoin;
        EXPECT_EQ(Run(engine, join, {}).Report(), "ok");
      }
    });
}

}  // namespace
}  // namespace sparkvod
