// Reducescatter, alltoall, grouped allgather: unequal shares on every world and transport; what
// ranks may disagree about.
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "tests/native/terms.h"
#include "tests/native/world.h"

namespace sparkvod {
namespace {

using namespace check;  // NOLINT: a test of what check's worlds run

const std::vector<int> kSizes = {1, 2, 3, 5, 8};

// Submits, waits and returns what was made in engine memory.
Result RunFor(Engine& engine, const Request& request, const std::vector<Part>& parts,
              std::vector<Output>* outputs) {
  int64_t handle = 0;
  SPARKVOD_TRY(engine.Submit(request, parts, false, &handle));
  std::shared_ptr<Operation> operation;
  SPARKVOD_TRY(engine.Find(handle, &operation));
  const Result result = End(engine, handle);
  *outputs = operation->outputs;
  return result;
}

// One reducescatter of [rows, width] floats, checked.
void CheckReducescatter(Engine& engine, int64_t rows, int64_t width, bool in_engine, ReduceOp op,
                        double prescale = 1) {
  const int rank = engine.topology().rank, size = engine.topology().size;
  const auto count = static_cast<size_t>(rows * width);
  std::vector<float> in(count);
  for (size_t i = 0; i < count; ++i) in[i] = Term(rank, i);
  std::shared_ptr<Memory> memory;
  const void* data = in.data();
  if (in_engine) {
    EXPECT(engine.Allocate(count * sizeof(float), &memory).ok());
    if (count > 0) std::memcpy(memory->data(), in.data(), count * sizeof(float));
    data = memory->data();
  }
  const auto begin = static_cast<size_t>(FirstRow(rows, rank, size) * width);
  const auto end = static_cast<size_t>(FirstRow(rows, rank + 1, size) * width);
  std::vector<float> out(end - begin, -1), expected(end - begin);
  for (size_t i = begin; i < end; ++i) {
    float& sum = expected[i - begin] = Term(0, i);
    for (int r = 1; r < size; ++r)
      sum = op == ReduceOp::kMax ? std::max(sum, Term(r, i)) : sum + Term(r, i);
    if (op == ReduceOp::kAverage) sum *= static_cast<float>(1.0 / size);
    sum *= static_cast<float>(prescale);
  }
  Request request = RequestOf("rs" + std::to_string(rows) + "." + std::to_string(width) + "." +
                                  NameOf(op) + (in_engine ? "e" : "") + std::to_string(prescale),
                              Collective::kReducescatter, {{DType::kFloat32, {rows, width}}});
  request.op = op;
  request.prescale = prescale;
  EXPECT_EQ(Run(engine, request, {{data, out.data(), count}}, rows % 2 == 0).Report(), "ok");
  if (out != expected) Fail(__FILE__, __LINE__, request.name + " is wrong");
}

TEST(ReducescatterOfUnequalShares) {
  for (const Kind& kind : Kinds())
    for (int size : kSizes)
      RunWorld(kind, size, [size](Engine& engine, int) {
        for (int64_t rows : {0, 1, 2, 7, 1003})
          for (int64_t width : {1, 0, 5, 130}) {
            if (!Full() && size == 8 && width != 5) continue;
            if (PathsOnly() && size == 5 && width != 130) continue;
            for (bool in_engine : {false, true})
              for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMax})
                CheckReducescatter(engine, rows, width, in_engine, op);
          }
        CheckReducescatter(engine, 1003, 130, false, ReduceOp::kSum, 2);
        CheckReducescatter(engine, 11, 1, true, ReduceOp::kSum, 0.5);
        for (int turn = 0; turn < 3;
             ++turn)  // cached, and between others that use the staging areas
          CheckReducescatter(engine, 40001, 3, turn == 1, ReduceOp::kSum);
      });
}

// Rows that rank q sends to rank r, in one of several patterns.
int64_t SplitOf(int pattern, int q, int r, int size) {
  switch (pattern) {
    case 0:
      return 0;
    case 1:
      return q == size - 1 && r == 0 ? 5 : 0;
    case 2:
      return (q + 2 * r) % 4;
    default:
      return 1000 * (1 + (q + r) % 3);
  }
}

TEST(AlltoallOfUnequalSplits) {
  for (const Kind& kind : Kinds())
    for (int size : kSizes)
      RunWorld(kind, size, [size](Engine& engine, int rank) {
        for (int turn = 0; turn < 2; ++turn)
          for (int pattern = 0; pattern < 4; ++pattern)
            for (int64_t width : {1, 3, 24}) {
              if (!Full() && size == 8 && width != 3) continue;
              if (PathsOnly() && size == 5 && width != 24) continue;
              std::vector<int32_t> in, expected;
              Request request = RequestOf("a" + std::to_string(width), Collective::kAlltoall, {});
              const auto value = [](int q, int r, int64_t i) {
                return static_cast<int32_t>(q * 1000000 + r * 10000 + i % 9973);
              };
              std::vector<int64_t> received;
              for (int r = 0; r < size; ++r) {
                request.splits.push_back(SplitOf(pattern, rank, r, size));
                received.push_back(SplitOf(pattern, r, rank, size));
                for (int64_t i = 0; i < request.splits.back() * width; ++i)
                  in.push_back(value(rank, r, i));
                for (int64_t i = 0; i < received.back() * width; ++i)
                  expected.push_back(value(r, rank, i));
              }
              const int64_t rows =
                  std::accumulate(request.splits.begin(), request.splits.end(), int64_t{0});
              // What the splits leave is not sent.
              in.resize(in.size() + static_cast<size_t>(width));
              request.entries.push_back({DType::kInt32, {rows + 1, width}});
              std::vector<Output> outputs;
              EXPECT_EQ(
                  RunFor(engine, request, {{in.data(), nullptr, in.size()}}, &outputs).Report(),
                  "ok");
              if (outputs.size() != 1) return Fail(__FILE__, __LINE__, "no output");
              EXPECT(outputs[0].rows == received);
              EXPECT_EQ(outputs[0].memory->bytes(), expected.size() * sizeof(int32_t));
              EXPECT(expected.empty() || std::memcmp(outputs[0].memory->data(), expected.data(),
                                                     expected.size() * sizeof(int32_t)) == 0);
            }
        // Equal splits need not be given.
        const std::vector<int64_t> own(static_cast<size_t>(2 * size), rank);
        std::vector<Output> outputs;
        const Request equal =
            RequestOf("equal", Collective::kAlltoall, {{DType::kInt64, {2 * size}}});
        EXPECT_EQ(RunFor(engine, equal, {{own.data(), nullptr, own.size()}}, &outputs).Report(),
                  "ok");
        const auto* got = reinterpret_cast<const int64_t*>(outputs.at(0).memory->data());
        for (int r = 0; r < size; ++r) EXPECT_EQ(got[2 * r + 1], int64_t{r});
      });
}

TEST(AllgatherOfAGroup) {
  for (const Kind& kind : Kinds())
    for (int size : {1, 2, 3})
      RunWorld(kind, size, [size](Engine& engine, int rank) {
        for (int64_t rows : {1, 5000}) {
          const std::vector<float> a(static_cast<size_t>(rows * (rank + 1)),
                                     static_cast<float>(rank));
          const std::vector<uint8_t> b(static_cast<size_t>(rank) * 3, static_cast<uint8_t>(rank));
          const Request request =
              RequestOf("group", Collective::kAllgather,
                        {{DType::kFloat32, {rows * (rank + 1)}}, {DType::kUInt8, {rank, 3}}});
          std::vector<Output> outputs;
          EXPECT_EQ(RunFor(engine, request,
                           {{a.data(), nullptr, a.size()}, {b.data(), nullptr, b.size()}}, &outputs)
                        .Report(),
                    "ok");
          if (outputs.size() != 2) return Fail(__FILE__, __LINE__, "two outputs were expected");
          const auto* floats = reinterpret_cast<const float*>(outputs[0].memory->data());
          const auto* bytes = reinterpret_cast<const uint8_t*>(outputs[1].memory->data());
          for (int r = 0; r < size; ++r) {
            EXPECT_EQ(outputs[0].rows[static_cast<size_t>(r)], rows * (r + 1));
            for (int64_t i = 0; i < rows * (r + 1); ++i)
              EXPECT_EQ(*floats++, static_cast<float>(r));
            for (int i = 0; i < 3 * r; ++i) EXPECT_EQ(int{*bytes++}, r);
          }
        }
      });
}

// Small ones that are there at the same time travel together, each with its own rows.
TEST(SmallExchangesTravelTogether) {
  constexpr size_t kMany = 20;
  for (const Kind& kind : Kinds())
    for (int size : {1, 2, 3})
      RunWorld(kind, size, [size](Engine& engine, int rank) {
        for (int turn = 0; turn < 3; ++turn) {
          std::vector<std::vector<float>> in(kMany), shares(kMany);
          std::vector<std::vector<int16_t>> own(kMany);
          std::vector<int64_t> sums, gathers;
          std::vector<std::shared_ptr<Operation>> gathered(kMany);
          for (size_t t = 0; t < kMany; ++t) {
            const auto rows = static_cast<int64_t>(t);
            // Of the last one, which is too large, alone; of some, for some ranks, nothing.
            const int64_t width = t + 1 == kMany ? 9000 : 3;
            for (int64_t i = 0; i < rows * width; ++i)
              in[t].push_back(static_cast<float>(i + rank));
            shares[t].resize(static_cast<size_t>(
                (FirstRow(rows, rank + 1, size) - FirstRow(rows, rank, size)) * width));
            Request sum = RequestOf("s" + std::to_string(t), Collective::kReducescatter,
                                    {{DType::kFloat32, {rows, width}}});
            sum.op = ReduceOp::kSum;
            if (t % 5 == 4) sum.postscale = 2;
            sums.push_back(0);
            EXPECT(engine
                       .Submit(sum, {{in[t].data(), shares[t].data(), in[t].size()}}, true,
                               &sums.back())
                       .ok());
            own[t].assign(t * static_cast<size_t>(rank), static_cast<int16_t>(100 * rank + turn));
            gathers.push_back(0);
            EXPECT(engine
                       .Submit(RequestOf("g" + std::to_string(t), Collective::kAllgather,
                                         {{DType::kInt16, {rank, rows}}}),
                               {{own[t].data(), nullptr, own[t].size()}}, true, &gathers.back())
                       .ok());
            EXPECT(engine.Find(gathers.back(), &gathered[t]).ok());
          }
          for (size_t t = 0; t < kMany; ++t) {
            EXPECT_EQ(End(engine, sums[t]).Report(), "ok");
            const auto rows = static_cast<int64_t>(t);
            const auto begin =
                static_cast<size_t>(FirstRow(rows, rank, size)) * (t + 1 == kMany ? 9000 : 3);
            for (size_t i = 0; i < shares[t].size(); ++i) {
              const auto sum =
                  static_cast<float>(size * static_cast<int>(begin + i) + size * (size - 1) / 2);
              EXPECT_EQ(shares[t][i], (t % 5 == 4 ? 2 : 1) * sum);
            }
            EXPECT_EQ(End(engine, gathers[t]).Report(), "ok");
            const Output& output = gathered[t]->outputs.at(0);
            const auto* got = reinterpret_cast<const int16_t*>(output.memory->data());
            for (int r = 0; r < size; ++r) {
              EXPECT_EQ(output.rows[static_cast<size_t>(r)], int64_t{r});
              for (size_t i = 0; i < t * static_cast<size_t>(r); ++i)
                EXPECT_EQ(int{*got++}, 100 * r + turn);
            }
          }
        }
        for (const char* what : {"allgather/", "reducescatter/"}) {
          const Stats::Carried carried = Carried(engine, what);
          EXPECT_EQ(carried.tensors, uint64_t{3 * kMany});
          EXPECT(carried.calls < 3 * kMany);
        }
      });
}

// A group is one unit: its small tensors are one call, whatever their dtypes.
TEST(AGroupOfSmallOnesIsOneCall) {
  RunWorld(kInproc, 3, [](Engine& engine, int rank) {
    std::vector<double> data(30, 1.0), shares(30);
    std::vector<uint8_t> bytes(5, static_cast<uint8_t>(rank));
    std::vector<Entry> entries(8, {DType::kFloat64, {30}});
    std::vector<Part> parts(8, {data.data(), nullptr, data.size()});
    entries.push_back({DType::kUInt8, {5}});
    parts.push_back({bytes.data(), nullptr, bytes.size()});
    std::vector<Output> outputs;
    EXPECT_EQ(RunFor(engine, RequestOf("group", Collective::kAllgather, entries), parts, &outputs)
                  .Report(),
              "ok");
    EXPECT_EQ(outputs.size(), size_t{9});
    for (const Output& output : outputs)
      EXPECT(output.rows == std::vector<int64_t>(3, output.rows[0]));
    EXPECT_EQ(int{reinterpret_cast<const uint8_t*>(outputs[8].memory->data())[14]}, 2);
    entries.pop_back();
    parts.pop_back();
    for (size_t p = 0; p < parts.size(); ++p) parts[p].out = shares.data();  // of which 10 are ours
    Request sum = RequestOf("sums", Collective::kReducescatter, entries);
    sum.op = ReduceOp::kSum;
    sum.prescale = 2;
    EXPECT_EQ(Run(engine, sum, parts).Report(), "ok");
    EXPECT_EQ(shares[9], 6.0);
    EXPECT_EQ(shares[10], 0.0);
    EXPECT_EQ(Carried(engine, "allgather/").calls, uint64_t{1});
    EXPECT_EQ(Carried(engine, "reducescatter/").calls, uint64_t{1});
    EXPECT_EQ(Carried(engine, "reducescatter/").tensors, uint64_t{8});
  });
}

// Everything in turn, so that no collective treads on what another has published.
TEST(CollectivesOfAllKindsInTurn) {
  for (const Kind& kind : Kinds())
    RunWorld(kind, 3, [](Engine& engine, int rank) {
      for (int turn = 0; turn < 12; ++turn) {
        const int64_t rows = turn % 3 == 0 ? 40 : 90001;
        std::vector<float> data(static_cast<size_t>(rows), 1.0f + static_cast<float>(rank));
        const Request sum = AllreduceOf("sum", DType::kFloat32, {rows});
        EXPECT_EQ(Run(engine, sum, {{data.data(), data.data(), data.size()}}).Report(), "ok");
        EXPECT(data == std::vector<float>(data.size(), 6.0f));
        CheckReducescatter(engine, rows, 1, turn % 2 == 0, ReduceOp::kSum);
        std::vector<float> got;
        std::vector<int64_t> by_rank;
        EXPECT_EQ(Gather(engine, "g", rows, 1, static_cast<float>(rank), &got, &by_rank).Report(),
                  "ok");
        EXPECT_EQ(got[static_cast<size_t>(rows)], 1.0f);
        Request spread = RequestOf("b", Collective::kBroadcast, {{DType::kFloat32, {rows}}});
        spread.root = turn % 3;
        data.assign(data.size(), static_cast<float>(rank));
        EXPECT_EQ(Run(engine, spread, {{data.data(), data.data(), data.size()}}).Report(), "ok");
        EXPECT(data == std::vector<float>(data.size(), static_cast<float>(turn % 3)));
      }
    });
}

// From engine memory of the root the others read it where it lies.
TEST(BroadcastFromEngineMemory) {
  for (const Kind& kind : Kinds())
    RunWorld(kind, 3, [](Engine& engine, int rank) {
      for (int64_t count : {3, 200000}) {
        std::shared_ptr<Memory> memory;
        EXPECT(engine.Allocate(static_cast<size_t>(count), &memory).ok());
        std::memset(memory->data(), rank + 1, static_cast<size_t>(count));
        Request request = RequestOf("b", Collective::kBroadcast, {{DType::kUInt8, {count}}});
        request.root = 1;
        const Part part{memory->data(), memory->data(), static_cast<size_t>(count)};
        for (int turn = 0; turn < 3; ++turn) EXPECT_EQ(Run(engine, request, {part}).Report(), "ok");
        EXPECT_EQ(int{memory->data()[count - 1]}, 2);
      }
    });
}

// More than 2^31 elements: what counts them is wide enough. In full only, up to 8 GiB in all, and
// in the plain build, since shadows of such memory would not fit.
TEST(MoreElementsThan31BitsCount) {
  if (!Full() || kSanitized) return;
  constexpr int64_t kCount = (int64_t{1} << 31) + 5;
  constexpr auto kLarge = static_cast<size_t>(kCount);
  for (const Kind& kind : {kInproc, kTcp}) {
    WorldOptions options;
    options.config.arena_bytes = int64_t{6} << 30;
    options.config.staging_bytes = 4 << 20;  // a few hundred pieces, not thousands
    RunWorld(
        kind, 2,
        [](Engine& engine, int rank) {
          std::vector<uint8_t> data(kLarge, static_cast<uint8_t>(rank + 1));
          data.back() = 40;
          const Request sum = AllreduceOf("large", DType::kUInt8, {kCount});
          EXPECT_EQ(Run(engine, sum, {{data.data(), data.data(), kLarge}}).Report(), "ok");
          EXPECT_EQ(int{data[(size_t{1} << 31) + 3]}, 3);
          EXPECT_EQ(int{data.back()}, 80);
          {
            std::vector<uint8_t> out(
                static_cast<size_t>(FirstRow(kCount, rank + 1, 2) - FirstRow(kCount, rank, 2)));
            const Request scatter =
                RequestOf("scatter", Collective::kReducescatter, {{DType::kUInt8, {kCount}}});
            EXPECT_EQ(Run(engine, scatter, {{data.data(), out.data(), kLarge}}).Report(), "ok");
            EXPECT_EQ(int{out[0]}, 6);
            if (rank == 1) EXPECT_EQ(int{out.back()}, 160);
          }
          data.front() = static_cast<uint8_t>(10 + rank);
          data.back() = static_cast<uint8_t>(20 + rank);
          Request spread = RequestOf("spread", Collective::kBroadcast, {{DType::kUInt8, {kCount}}});
          spread.root = 1;
          EXPECT_EQ(Run(engine, spread, {{data.data(), data.data(), kLarge}}).Report(), "ok");
          EXPECT_EQ(int{data.front()}, 11);
          EXPECT_EQ(int{data.back()}, 21);
          // Rank 1 has all but two of the rows, and then sends all of them to rank 0.
          data.front() = static_cast<uint8_t>(30 + rank);
          const int64_t own = rank == 0 ? 2 : kCount;
          std::vector<Output> outputs;
          const Part part{data.data(), nullptr, static_cast<size_t>(own)};
          const Request gather =
              RequestOf("gather", Collective::kAllgather, {{DType::kUInt8, {own}}});
          EXPECT_EQ(RunFor(engine, gather, {part}, &outputs).Report(), "ok");
          const auto at = [&](size_t i) {
            return int{static_cast<uint8_t>(outputs.at(0).memory->data()[i])};
          };
          EXPECT(outputs.at(0).rows == (std::vector<int64_t>{2, kCount}));
          EXPECT_EQ(outputs.at(0).memory->bytes(), kLarge + 2);
          EXPECT_EQ(at(0), 30);
          EXPECT_EQ(at(2), 31);
          EXPECT_EQ(at(kLarge + 1), 21);
          outputs.clear();
          Request turn = RequestOf("turn", Collective::kAlltoall, {{DType::kUInt8, {own}}});
          turn.splits = {rank == 0 ? 1 : kCount, 0};
          EXPECT_EQ(RunFor(engine, turn, {part}, &outputs).Report(), "ok");
          EXPECT_EQ(outputs.at(0).memory->bytes(), rank == 0 ? kLarge + 1 : size_t{0});
          if (rank == 0) EXPECT_EQ(at(1), 31);
          if (rank == 0) EXPECT_EQ(at(kLarge), 21);
        },
        options);
  }
}

// A disagreement names who sent what, ends on all ranks, and leaves the engine as it was.
TEST(ExchangesThatDisagree) {
  for (const Kind& kind : Kinds())
    RunWorld(kind, 3, [](Engine& engine, int rank) {
      std::vector<float> data(64), out(64);
      const Part part{data.data(), out.data(), 12};
      const bool odd = rank == 1;
      Request rows = RequestOf("rs", Collective::kReducescatter,
                               {{DType::kFloat32, {odd ? 4 : 3, odd ? 3 : 4}}});
      Result result = Run(engine, rows, {part});
      EXPECT(result.code() == Code::kMismatch);
      EXPECT_CONTAINS(result.Report(), "ranks 0,2 sent reducescatter (sum) of float32 [3,4]");
      EXPECT_CONTAINS(result.Report(), "rank 1 sent reducescatter (sum) of float32 [4,3]");
      Request op = RequestOf("rs", Collective::kReducescatter, {{DType::kFloat32, {3, 4}}});
      if (odd) op.op = ReduceOp::kMax;
      EXPECT_CONTAINS(Run(engine, op, {part}).Report(), "rank 1 sent reducescatter (max)");
      Request all =
          RequestOf("a", Collective::kAlltoall, {{odd ? DType::kInt32 : DType::kFloat32, {3, 4}}});
      EXPECT_CONTAINS(Run(engine, all, {part}).Report(), "rank 1 sent alltoall of int32 [3,4]");
      Request kinds = RequestOf("k", odd ? Collective::kAlltoall : Collective::kAllgather,
                                {{DType::kFloat32, {3, 4}}});
      EXPECT_CONTAINS(Run(engine, kinds, {part}).Report(), "rank 1 sent alltoall");
      CheckReducescatter(engine, 100, 7, false, ReduceOp::kSum);
    });
}

TEST(ExchangesRefuseTheCallersMistakes) {
  RunWorld(kInproc, 2, [](Engine& engine, int) {
    std::vector<float> data(12);
    const Part part{data.data(), data.data(), 12};
    int64_t handle = 0;
    const auto refusal = [&](const Request& request) {
      const Result result = engine.Submit(request, {part}, true, &handle);
      EXPECT(result.code() == Code::kInvalid);
      return result.Report();
    };
    Request all = RequestOf("a", Collective::kAlltoall, {{DType::kFloat32, {3, 4}}});
    EXPECT_CONTAINS(refusal(all), "3 rows, which 2 ranks cannot share equally");
    all.splits = {1};
    EXPECT_CONTAINS(refusal(all), "1 splits; one for each of 2 ranks");
    all.splits = {2, 2};
    EXPECT_CONTAINS(refusal(all), "splits of more rows than its 3");
    all.splits = {-1, 2};
    EXPECT_CONTAINS(refusal(all), "a split of -1 rows");
    all.entries[0].shape = {};
    EXPECT_CONTAINS(refusal(all), "at least one dimension");
    EXPECT_CONTAINS(refusal(RequestOf("r", Collective::kReducescatter, {{DType::kFloat32, {}}})),
                    "at least one dimension");
    Request adasum = RequestOf("r", Collective::kReducescatter, {{DType::kFloat32, {12}}});
    adasum.op = ReduceOp::kAdasum;
    EXPECT_CONTAINS(refusal(adasum), "reducescatter (adasum)");
  });
}

}  // namespace
}  // namespace sparkvod
