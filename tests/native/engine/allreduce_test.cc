// Allreduce: every dtype, size, memory, world and transport, exactly; and what carried it.
#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "tests/native/engine/exact.h"

namespace sparkvod {
namespace {

using namespace check;  // NOLINT: a test of what check's worlds run

// Of the product of worlds, dtypes and operations: every pair of these is there; of paths alone,
// each dtype once.
bool Sampled(int size, DType dtype, ReduceOp op) {
  if (dtype == DType::kFloat32) return (size != 8 && !PathsOnly()) || op <= ReduceOp::kSum;
  if (PathsOnly()) return size == 2 + static_cast<int>(dtype) % 2 && op == ReduceOp::kSum;
  const int turn = static_cast<int>(dtype) + static_cast<int>(op);
  return size == 2 + turn % 2;
}

// In full: the product of everything. Else a part of it, on two worlds but for float32.
TEST(AllreduceIsExact) {
  for (const Kind& kind : Kinds()) {
    for (int size : {1, 2, 3, 5, 8}) {
      RunWorld(kind, size, [size](Engine& engine, int) {
        for (DType dtype : kReduced) {
          if (!Full() && size != 2 && size != 3 && dtype != DType::kFloat32) continue;
          for (size_t count : {0, 1, 7, 1003, 20000, 300001}) {
            if (LeftOut(dtype, count)) continue;
            if (!Full() && count > 20000 && (dtype != DType::kFloat32 || size > 3)) continue;
            if (!Full() && dtype != DType::kFloat32 && (count == 0 || count == 7)) continue;
            if (PathsOnly() && (count == 7 || (count == 1 && size > 2))) continue;
            for (ReduceOp op : kOps) {
              if (!Supported(dtype, op) || (!Full() && !Sampled(size, dtype, op))) continue;
              for (Place place : kPlaces)
                if (!Full() || !OtherPlace(dtype, op, count, place))
                  CheckAllreduce(engine, dtype, count, place, op);
            }
          }
        }
      });
    }
  }
}

TEST(AllreduceIsCarriedAsStatsSay) {
  for (const Kind& kind : Kinds()) {
    RunWorld(kind, 2, [&kind](Engine& engine, int) {
      const bool shares = kind.transport != kTcp.transport;
      CheckAllreduce(engine, DType::kFloat32, 100, Place::kInPlace, ReduceOp::kSum);
      CheckAllreduce(engine, DType::kFloat32, 300000, Place::kInPlace, ReduceOp::kSum);
      CheckAllreduce(engine, DType::kFloat32, 300000, Place::kEngine, ReduceOp::kSum);
      const std::string prefix = std::string("allreduce/") + kind.transport + "/";
      if (shares) {
        EXPECT_EQ(Carried(engine, prefix + "one-shot").calls, uint64_t{1});
        EXPECT_EQ(Carried(engine, prefix + "staged").calls, uint64_t{1});
        EXPECT_EQ(Carried(engine, prefix + "in-place").calls, uint64_t{1});
        EXPECT_EQ(Carried(engine, prefix + "in-place").bytes, uint64_t{1200000});
      } else {
        EXPECT_EQ(Carried(engine, prefix + "doubling").calls, uint64_t{1});
        EXPECT_EQ(Carried(engine, prefix + "ring").calls, uint64_t{2});
      }
      EXPECT_EQ(Carried(engine, prefix).calls, uint64_t{3});
      EXPECT_EQ(Carried(engine, "").calls, uint64_t{3});
    });
  }
}

// Of the product of layouts, dtypes and operations: every operation on one layout of each
// algorithm, every dtype with some operation.
bool SampledOver(const std::string& layout, DType dtype, ReduceOp op) {
  if (Full()) return true;
  const bool one_of_its_kind = layout == "aabb" || layout == "aab";
  if (dtype == DType::kFloat32 && (op <= ReduceOp::kSum || !PathsOnly()))
    return one_of_its_kind || op == ReduceOp::kSum;
  return one_of_its_kind && Sampled(layout == "aabb" ? 2 : 3, dtype, op);
}

// Hosts by their ranks. Where all have several, equally many, each local rank carries its share
// across.
TEST(AllreduceOverSeveralHosts) {
  const std::vector<std::string> layouts = {"aabb", "abab", "aaabbb", "aabbcc",
                                            "ab",   "aab",  "aabc"};
  for (const std::string& layout : layouts) {
    const bool hierarchical = layout != "ab" && layout != "aab" && layout != "aabc";
    WorldOptions options;
    for (const char host : layout) options.hosts.emplace_back(1, host);
    RunWorld(
        kInproc, static_cast<int>(layout.size()),
        [&](Engine& engine, int rank) {
          const Topology& topology = engine.topology();
          const auto on_host =
              std::count(layout.begin(), layout.end(), layout[static_cast<size_t>(rank)]);
          EXPECT_EQ(topology.local_size, static_cast<int>(on_host));
          EXPECT_EQ(topology.cross_ranks[static_cast<size_t>(topology.cross_rank)], rank);
          for (DType dtype : kReduced)
            for (size_t count : {0, 1, 7, 1003, 20001}) {
              if (!Full() && dtype != DType::kFloat32 && (count == 0 || count == 7)) continue;
              for (Place place : kPlaces)
                for (ReduceOp op : kOps)
                  if (Supported(dtype, op) && SampledOver(layout, dtype, op) &&
                      (!Full() || !OtherPlace(dtype, op, count, place)))
                    CheckAllreduce(engine, dtype, count, place, op);
            }
          // Larger than the pieces in which ordinary memory crosses hosts.
          if (layout == "aabb")
            CheckAllreduce(engine, DType::kFloat32, (5 << 20) + 3, Place::kApart, ReduceOp::kSum);
          std::vector<float> got;
          std::vector<int64_t> rows;
          EXPECT_EQ(Gather(engine, "rows", rank, 2, 1.0f, &got, &rows).Report(), "ok");
          EXPECT_EQ(rows.back(), static_cast<int64_t>(layout.size()) - 1);
          // What had no elements was carried by nothing; all else went the expected way.
          for (const auto& [key, carried] : engine.GetStats().collectives)
            if (key.rfind("allreduce/", 0) == 0 && carried.bytes > 0)
              EXPECT_EQ(key.substr(key.rfind('/') + 1) == "hierarchical", hierarchical);
        },
        options);
  }
}

TEST(AllreduceScalesBeforeAndAfter) {
  for (const Kind& kind : Kinds()) {
    RunWorld(kind, 3, [](Engine& engine, int rank) {
      for (size_t count : {3, 50000}) {
        std::vector<float> in(count, static_cast<float>(rank + 1)), out(count);
        std::vector<int32_t> ints(count, 10 * (rank + 1));
        Request request = AllreduceOf("scaled" + std::to_string(count), DType::kFloat32,
                                      {static_cast<int64_t>(count)});
        request.prescale = 0.5;
        request.postscale = 4;
        EXPECT_EQ(Run(engine, request, {{in.data(), out.data(), count}}).Report(), "ok");
        EXPECT(out == std::vector<float>(count, 12.0f));
        EXPECT_EQ(in[0], static_cast<float>(rank + 1));
        request.op = ReduceOp::kAverage;
        EXPECT_EQ(Run(engine, request, {{in.data(), in.data(), count}}).Report(), "ok");
        EXPECT(in == std::vector<float>(count, 1.0f * 3 * 4 * static_cast<float>(1.0 / 3)) ||
               in == std::vector<float>(count, 4.0f));
        request = AllreduceOf("ints" + std::to_string(count), DType::kInt32,
                              {static_cast<int64_t>(count)});
        request.postscale = 0.5;
        EXPECT_EQ(Run(engine, request, {{ints.data(), ints.data(), count}}).Report(), "ok");
        EXPECT(ints == std::vector<int32_t>(count, 30));
      }
    });
  }
}

// The sum of what is averaged is larger than float16 holds, the average is not.
TEST(AllreduceAveragesLargeHalves) {
  WorldOptions two_hosts;
  two_hosts.hosts = {"a", "a", "b", "b"};
  const auto body = [](Engine& engine, int rank) {
    for (const ReduceOp op : {ReduceOp::kAverage, ReduceOp::kSum}) {
      const uint16_t value = rank == 0 ? 0x7b00 : 0x7900;  // 57344 and 40960
      std::vector<uint16_t> data(3000, value);
      const Request request = AllreduceOf("halves", DType::kFloat16, {3000}, op);
      EXPECT_EQ(End(engine, Start(engine, request, data.data())).Report(), "ok");
      const uint16_t average = engine.topology().size == 3 ? 0x79ab : 0x7980;  // 46432 and 45056
      EXPECT_EQ(data[0], op == ReduceOp::kSum ? 0x7c00 : average);
      EXPECT(data == std::vector<uint16_t>(3000, data[0]));
    }
  };
  for (const Kind& kind : Kinds()) RunWorld(kind, 3, body);
  RunWorld(kInproc, 4, body, two_hosts);
}

// Random floats round differently in different orders: every rank must hold the same bits all the
// same.
TEST(AllreduceGivesAllRanksTheSameBits) {
  for (const Kind& kind : Kinds()) {
    RunWorld(kind, 3, [](Engine& engine, int rank) {
      for (int64_t count : {17, 9999, 400000}) {
        for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
          std::mt19937 draw(static_cast<uint32_t>(rank) + 7);
          std::vector<uint16_t> data(static_cast<size_t>(count) * SizeOf(dtype) / 2);
          for (uint16_t& half : data)
            half = static_cast<uint16_t>(draw() & 0xbfff);  // no NaN, no infinity
          const std::string name = "bits" + std::to_string(count) + NameOf(dtype);
          const Request request = AllreduceOf(name, dtype, {count}, ReduceOp::kAverage);
          EXPECT_EQ(End(engine, Start(engine, request, data.data())).Report(), "ok");
          // Everybody compares with rank 0's.
          std::vector<uint16_t> first = data;
          Request broadcast;
          broadcast.name = "of rank 0";
          broadcast.collective = Collective::kBroadcast;
          broadcast.entries.push_back({dtype, {count}});
          EXPECT_EQ(
              Run(engine, broadcast, {{first.data(), first.data(), static_cast<size_t>(count)}})
                  .Report(),
              "ok");
          EXPECT(first == data);
        }
      }
    });
  }
}

// Many tensors, submitted in another order on every rank, wait for nobody's turn and meet in few
// calls.
TEST(AllreduceOfManyTensorsInAnyOrder) {
  for (const Kind& kind : Kinds()) {
    for (int size : {2, 3, 5}) {
      RunWorld(kind, size, [size](Engine& engine, int rank) {
        constexpr int kTensors = 200;
        for (int turn = 0; turn < 3; ++turn) {
          std::vector<int> order(kTensors);
          for (int t = 0; t < kTensors; ++t) order[t] = t;
          std::shuffle(order.begin(), order.end(),
                       std::mt19937(static_cast<uint32_t>(rank + turn * 10)));
          std::vector<std::vector<float>> tensors;
          for (int t = 0; t < kTensors; ++t)
            tensors.emplace_back(static_cast<size_t>(t * 7 % 1030), static_cast<float>(t + rank));
          std::vector<int64_t> handles(kTensors);
          for (int t : order) {
            const auto count = static_cast<int64_t>(tensors[t].size());
            handles[t] =
                Start(engine, AllreduceOf("t" + std::to_string(t), DType::kFloat32, {count}),
                      tensors[t].data());
          }
          for (int t : order) {
            EXPECT_EQ(End(engine, handles[t]).Report(), "ok");
            const auto expected = static_cast<float>(t * size + size * (size - 1) / 2);
            EXPECT(tensors[t] == std::vector<float>(tensors[t].size(), expected));
          }
        }
        const Stats stats = engine.GetStats();
        EXPECT_EQ(Carried(engine, "allreduce/").tensors, uint64_t{3 * kTensors});
        EXPECT(Carried(engine, "allreduce/").calls < 3 * kTensors);
        EXPECT(stats.cache_hits >= 2 * kTensors - 100);
      });
    }
  }
}

// A grouped call is one unit: several tensors and dtypes, one handle.
TEST(AllreduceOfAGroup) {
  for (const Kind& kind : Kinds()) {
    RunWorld(kind, 3, [](Engine& engine, int rank) {
      std::vector<float> a(10, static_cast<float>(rank)), b(70000, 1.0f);
      std::vector<int64_t> c(5, rank);
      Request request;
      request.name = "group";
      request.op = ReduceOp::kSum;
      request.entries = {
          {DType::kFloat32, {10}}, {DType::kFloat32, {70, 1000}}, {DType::kInt64, {5}}};
      for (int turn = 0; turn < 2; ++turn) {
        a.assign(10, static_cast<float>(rank));
        b.assign(70000, 1.0f);
        c.assign(5, rank);
        const std::vector<Part> parts = {
            {a.data(), a.data(), 10}, {b.data(), b.data(), 70000}, {c.data(), c.data(), 5}};
        EXPECT_EQ(Run(engine, request, parts, turn == 0).Report(), "ok");
        EXPECT(a == std::vector<float>(10, 3.0f));
        EXPECT(b == std::vector<float>(70000, 3.0f));
        EXPECT(c == std::vector<int64_t>(5, 3));
      }
    });
  }
}

// Nobody waits: the background threads carry it.
TEST(AllreduceGoesOnInTheBackground) {
  for (const Kind& kind : Kinds()) {
    RunWorld(kind, 2, [](Engine& engine, int rank) {
      std::vector<float> data(5000, static_cast<float>(rank + 1));
      const int64_t handle =
          Start(engine, AllreduceOf("background", DType::kFloat32, {5000}), data.data());
      const Deadline deadline = Deadline::After(10);
      bool done = false;
      while (!done && !deadline.Passed()) EXPECT(engine.Poll(handle, &done).ok());
      EXPECT(done);
      EXPECT_EQ(data[4999], 3.0f);
      engine.Release(handle);
      EXPECT(engine.Poll(handle, &done).code() == Code::kInvalid);
    });
  }
}

}  // namespace
}  // namespace sparkvod
