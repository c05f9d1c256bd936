// The product of worlds, transports, collectives, dtypes, operations, sizes, memories and
// algorithms. In full all of it; else a little of each, what else is tested has the rest.
#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "tests/native/engine/exact.h"

namespace sparkvod {
namespace {

using namespace check;  // NOLINT: a test of what check's worlds run

// Runs what makes outputs in engine memory; empty when it failed.
std::vector<Output> Made(Engine& engine, const Request& request, const std::vector<Part>& parts) {
  int64_t handle = 0;
  std::shared_ptr<Operation> operation;
  EXPECT_EQ(engine.Submit(request, parts, false, &handle).Report(), "ok");
  if (!engine.Find(handle, &operation).ok()) return {};
  EXPECT_EQ(End(engine, handle).Report(), "ok");
  return operation->outputs;
}

// `rows` rows of `row` bytes that say who made them, for whom.
std::vector<uint8_t> Rows(int from, int to, size_t rows, size_t row) {
  std::vector<uint8_t> bytes(rows * row);
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<uint8_t>((i * 7 + i / 251) ^ static_cast<size_t>(from * 17 + to * 5));
  return bytes;
}

void Append(std::vector<uint8_t>* to, const std::vector<uint8_t>& more) {
  to->insert(to->end(), more.begin(), more.end());
}

bool Holds(const Output& output, const std::vector<uint8_t>& bytes) {
  return output.memory->bytes() == bytes.size() &&
         std::equal(bytes.begin(), bytes.end(),
                    reinterpret_cast<const uint8_t*>(output.memory->data()));
}

// One tensor of `rows` rows of three elements through every collective that only moves; each rank
// has another number of rows where ranks may.
void CheckMoves(Engine& engine, DType dtype, int64_t rows, bool in_engine) {
  const int rank = engine.topology().rank, size = engine.topology().size;
  const size_t row = 3 * SizeOf(dtype);
  const std::string name =
      std::string(NameOf(dtype)) + std::to_string(rows) + (in_engine ? "e" : "o");
  const auto rows_of = [&](int r) { return rows == 0 ? 0 : rows - 1 + (r + 1) % 3; };
  const auto split = [&](int q, int r) { return rows == 0 ? 0 : (rows + q + 2 * r) % (rows + 2); };

  Request spread = RequestOf("b" + name, Collective::kBroadcast, {{dtype, {rows, 3}}});
  spread.root = static_cast<int32_t>(rows) % size;
  const size_t count = static_cast<size_t>(rows) * 3;
  Block told(engine, in_engine, Rows(rank, 0, static_cast<size_t>(rows), row));
  EXPECT_EQ(Run(engine, spread, {{told.data(), told.data(), count}}).Report(), "ok");
  EXPECT(told.Holds(Rows(spread.root, 0, static_cast<size_t>(rows), row)));

  const auto own = static_cast<size_t>(rows_of(rank));
  Block mine(engine, in_engine, Rows(rank, 1, own, row));
  const Request gather =
      RequestOf("g" + name, Collective::kAllgather, {{dtype, {rows_of(rank), 3}}});
  std::vector<uint8_t> all;
  for (int r = 0; r < size; ++r) Append(&all, Rows(r, 1, static_cast<size_t>(rows_of(r)), row));
  std::vector<Output> got = Made(engine, gather, {{mine.data(), nullptr, own * 3}});
  EXPECT(got.size() == 1 && Holds(got[0], all));

  Request turn = RequestOf("a" + name, Collective::kAlltoall, {});
  std::vector<uint8_t> in, expected;
  std::vector<int64_t> received;
  for (int r = 0; r < size; ++r) {
    turn.splits.push_back(split(rank, r));
    received.push_back(split(r, rank));
    Append(&in, Rows(rank, r, static_cast<size_t>(turn.splits.back()), row));
    Append(&expected, Rows(r, rank, static_cast<size_t>(received.back()), row));
  }
  turn.entries = {
      {dtype, {std::accumulate(turn.splits.begin(), turn.splits.end(), int64_t{0}), 3}}};
  Block sent(engine, in_engine, in);
  got = Made(engine, turn, {{sent.data(), nullptr, in.size() / SizeOf(dtype)}});
  EXPECT(got.size() == 1 && got[0].rows == received && Holds(got[0], expected));
}

// A reducescatter of `rows` rows, which are the ranks' unequal shares.
void CheckShares(Engine& engine, DType dtype, int64_t rows, bool in_engine, ReduceOp op) {
  const int rank = engine.topology().rank, size = engine.topology().size;
  const auto count = static_cast<size_t>(rows);
  const auto begin = FirstRow(rows, rank, size), end = FirstRow(rows, rank + 1, size);
  Request request =
      RequestOf("s" + std::to_string(rows) + NameOf(dtype) + NameOf(op) + (in_engine ? "e" : "o"),
                Collective::kReducescatter, {{dtype, {rows}}});
  request.op = op;
  Block in(engine, in_engine, Input(dtype, op, size, rank, count));
  Block out(engine, false, std::vector<uint8_t>(static_cast<size_t>(end - begin) * SizeOf(dtype)));
  EXPECT_EQ(Run(engine, request, {{in.data(), out.data(), count}}).Report(), "ok");
  const std::vector<uint8_t> all = Expected(dtype, op, size, count);
  const auto bytes = static_cast<std::ptrdiff_t>(SizeOf(dtype));
  if (!out.Holds({all.begin() + begin * bytes, all.begin() + end * bytes}))
    Fail(__FILE__, __LINE__, request.name + " is wrong on rank " + std::to_string(rank));
}

// All dtypes in one group of each kind that there is.
void CheckGroups(Engine& engine, int64_t rows) {
  const int rank = engine.topology().rank, size = engine.topology().size;
  const auto count = static_cast<size_t>(rows);
  const auto begin = FirstRow(rows, rank, size), end = FirstRow(rows, rank + 1, size);
  const std::string suffix = std::to_string(rows);
  std::vector<Entry> entries;
  std::vector<Block> sums, shares;
  std::vector<Part> in_place, scattered, gathered;
  for (size_t d = 0; d < kReduced.size(); ++d) {
    const DType dtype = kReduced[d];
    entries.push_back({dtype, {rows}});
    const std::vector<uint8_t> input = Input(dtype, ReduceOp::kSum, size, rank, count);
    sums.emplace_back(engine, d % 2 == 0, input);
    shares.emplace_back(engine, false,
                        std::vector<uint8_t>(static_cast<size_t>(end - begin) * SizeOf(dtype)));
    scattered.push_back({sums[d].data(), shares[d].data(), count});
    gathered.push_back({sums[d].data(), nullptr, count});
    in_place.push_back({sums[d].data(), sums[d].data(), count});
  }
  const std::vector<Output> outputs =
      Made(engine, RequestOf("gathers" + suffix, Collective::kAllgather, entries), gathered);
  EXPECT_EQ(
      Run(engine, RequestOf("shares" + suffix, Collective::kReducescatter, entries), scattered)
          .Report(),
      "ok");
  EXPECT_EQ(
      Run(engine, RequestOf("sums" + suffix, Collective::kAllreduce, entries), in_place).Report(),
      "ok");
  EXPECT_EQ(outputs.size(), kReduced.size());
  for (size_t d = 0; d < outputs.size(); ++d) {
    const DType dtype = kReduced[d];
    const std::vector<uint8_t> all = Expected(dtype, ReduceOp::kSum, size, count);
    std::vector<uint8_t> inputs;
    for (int r = 0; r < size; ++r) Append(&inputs, Input(dtype, ReduceOp::kSum, size, r, count));
    const auto bytes = static_cast<std::ptrdiff_t>(SizeOf(dtype));
    EXPECT(Holds(outputs[d], inputs));
    EXPECT(shares[d].Holds({all.begin() + begin * bytes, all.begin() + end * bytes}));
    EXPECT(sums[d].Holds(all));
  }
}

// As of an allreduce, of the product in full a sanitizer goes through one memory for each.
bool OtherMemory(DType dtype, int64_t turn, bool in_engine) {
  return kSanitized && Full() && in_engine != ((static_cast<int64_t>(dtype) + turn) % 2 == 0);
}

void CheckExchanges(Engine& engine, const std::vector<int64_t>& all_rows) {
  for (const int64_t rows : all_rows) {
    for (const DType dtype : kReduced) {
      // In part: each dtype in some memory with some operation.
      const int turn = static_cast<int>(dtype) % 2;
      if (LeftOut(dtype, 3 * static_cast<size_t>(rows))) continue;
      for (const bool in_engine : {false, true}) {
        if (!Full() && in_engine != (turn == 0)) continue;
        if (!OtherMemory(dtype, rows, in_engine)) CheckMoves(engine, dtype, rows, in_engine);
        for (const ReduceOp op : kOps) {
          if (!Supported(dtype, op) || (!Full() && static_cast<int>(op) % 3 != turn)) continue;
          if (OtherMemory(dtype, rows + static_cast<int>(op), in_engine)) continue;
          CheckShares(engine, dtype, rows, in_engine, op);
        }
      }
    }
    CheckGroups(engine, rows);
  }
}

TEST(MatrixOfExchanges) {
  for (const Kind& kind : Kinds())
    for (const int size : {1, 2, 3, 5, 8}) {
      if (!Full() && (size != 3 || kind.processes)) continue;
      RunWorld(kind, size, [](Engine& engine, int) {
        CheckExchanges(engine, Full() ? std::vector<int64_t>{0, 1, 7, 1003, 40001}
                                      : std::vector<int64_t>{0, 7});
      });
    }
}

// Whatever carries it, the sum is the same. What the table chooses by itself, direct algorithms
// among them, AllreduceIsExact goes through.
void CheckAlgorithm(const std::string& algorithm) {
  for (const Kind& kind : Kinds())
    for (const int size : {2, 3, 5, 8}) {
      if (!Full() && (size != 3 || kind.transport != kInproc.transport)) continue;
      WorldOptions options;
      options.config.allreduce_algorithm = algorithm;
      RunWorld(
          kind, size,
          [](Engine& engine, int) {
            for (const DType dtype : kReduced)
              for (const ReduceOp op : kOps)
                for (const size_t count : {0, 1, 7, 1003, 40001})
                  for (const Place place : kPlaces) {
                    const int turn = static_cast<int>(dtype) + static_cast<int>(op);
                    if (!Supported(dtype, op) || LeftOut(dtype, count)) continue;
                    if (Full() && OtherPlace(dtype, op, count, place)) continue;
                    if (!Full() && (count != 7 || static_cast<int>(place) != turn % 3)) continue;
                    CheckAllreduce(engine, dtype, count, place, op);
                  }
          },
          options);
    }
}

TEST(MatrixOfRings) { CheckAlgorithm("ring"); }
TEST(MatrixOfHalvingDoubling) { CheckAlgorithm("halving-doubling"); }
TEST(MatrixOfDoubling) { CheckAlgorithm("doubling"); }
TEST(MatrixOfTrees) { CheckAlgorithm("tree"); }

TEST(MatrixOfBroadcasts) {
  if (!Full()) return;
  for (const Kind& kind : Kinds())
    for (const char* algorithm : {"chain", "tree"})
      for (const int size : {2, 3, 5, 8}) {
        WorldOptions options;
        options.config.broadcast_algorithm = algorithm;
        RunWorld(
            kind, size,
            [](Engine& engine, int) {
              for (const DType dtype : kReduced)
                for (const int64_t rows : {0, 1, 7, 1003, 40001})
                  for (const bool in_engine : {false, true})
                    if (!LeftOut(dtype, 3 * static_cast<size_t>(rows)) &&
                        !OtherMemory(dtype, rows, in_engine))
                      CheckMoves(engine, dtype, rows, in_engine);
            },
            options);
      }
}

// Over TCP each of 64 ranks has two sockets to each other one, 8,064 of this process.
bool MayOpen(const Kind& kind) {
  return kind.transport != kTcp.transport || MayOpenFiles(64 * 63 * 2 + 1000);
}

// 64 processes with a sanitizer's shadows, of all ranks' arenas, need more than 24 GiB.
int Many(const Kind& kind) { return !Full() || (kSanitized && kind.processes) ? 16 : 64; }

TEST(SixtyFourRanksReduce) {
  for (const Kind& kind : Kinds()) {
    if ((!Full() && kind.transport != kInproc.transport) || !MayOpen(kind)) continue;
    RunWorld(kind, Many(kind), [](Engine& engine, int) {
      for (const DType dtype : kReduced)
        for (const ReduceOp op : kOps)
          for (const size_t count : {0, 1, 7, 1003, 20001})
            for (const Place place : kPlaces) {
              if (!Supported(dtype, op)) continue;
              const int turn = static_cast<int>(dtype) + static_cast<int>(op);
              if (Full() ? OtherPlace(dtype, op, count, place)
                         : static_cast<int>(place) != turn % 3)
                continue;
              if (!Full() && (op != ReduceOp::kSum || count == 0 || count == 1003)) continue;
              CheckAllreduce(engine, dtype, count, place, op);
            }
    });
  }
}

TEST(SixtyFourRanksExchange) {
  if (!Full()) return;
  for (const Kind& kind : Kinds()) {
    if (!MayOpen(kind)) continue;
    RunWorld(kind, Many(kind), [](Engine& engine, int) {
      CheckExchanges(
          engine, kSanitized ? std::vector<int64_t>{0, 1, 7} : std::vector<int64_t>{0, 1, 7, 1003});
    });
  }
}

TEST(SixtyFourRanksByEveryAlgorithm) {
  if (!Full()) return;
  for (const Kind& kind : {kInproc, kTcp}) {
    if (!MayOpen(kind)) continue;
    for (const char* algorithm : {"ring", "halving-doubling", "doubling", "tree"}) {
      WorldOptions options;
      options.config.allreduce_algorithm = algorithm;
      options.config.broadcast_algorithm = algorithm == std::string("tree") ? "tree" : "chain";
      RunWorld(
          kind, 64,
          [](Engine& engine, int) {
            for (const size_t count : {1, 7, 20001})
              for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt8})
                CheckAllreduce(engine, dtype, count, Place::kInPlace, ReduceOp::kSum);
            CheckMoves(engine, DType::kFloat64, 7, false);
          },
          options);
    }
  }
}

}  // namespace
}  // namespace sparkvod
