// Allgather, broadcast and barrier; names that come again; callers on many threads.
#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "tests/native/world.h"

namespace sparkvod {
namespace {

using namespace check;  // NOLINT: a test of what check's worlds run

TEST(AllgatherOfUnequalRows) {
  for (const Kind& kind : Kinds()) {
    for (int size : {1, 2, 3, 5}) {
      RunWorld(kind, size, [size](Engine& engine, int rank) {
        // Nobody has rows; only the last has; each another number; many.
        for (int64_t factor : {int64_t{0}, int64_t{1}, int64_t{3}, int64_t{4000}}) {
          for (int64_t width : {1, 7}) {
            const auto rows_of = [&](int r) {
              return factor == 1 ? (r == size - 1 ? 2 : 0) : factor * r;
            };
            std::vector<float> got, expected;
            std::vector<int64_t> rows;
            const std::string name = "g" + std::to_string(factor) + "." + std::to_string(width);
            const Result result = Gather(engine, name, rows_of(rank), width,
                                         static_cast<float>(rank + 1), &got, &rows);
            EXPECT_EQ(result.Report(), "ok");
            EXPECT_EQ(rows.size(), static_cast<size_t>(size));
            for (int r = 0; r < size; ++r) {
              EXPECT_EQ(rows[static_cast<size_t>(r)], rows_of(r));
              expected.insert(expected.end(), static_cast<size_t>(rows_of(r) * width),
                              static_cast<float>(r + 1));
            }
            EXPECT(got == expected);
          }
        }
        EXPECT_EQ(Carried(engine, "allgather/").calls, uint64_t{8});
      });
    }
  }
}

// The cached agreement holds the rows of the last time; another number of rows must not be taken
// for it.
TEST(AllgatherOfOtherRowsUnderTheSameName) {
  for (const Kind& kind : Kinds()) {
    RunWorld(kind, 3, [](Engine& engine, int rank) {
      for (int turn = 0; turn < 6; ++turn) {
        std::vector<float> got;
        std::vector<int64_t> rows;
        // Only rank 1 changes, every other turn.
        const int64_t own = rank == 1 ? 1 + turn / 2 : 2;
        EXPECT_EQ(Gather(engine, "same", own, 2, 1.0f, &got, &rows).Report(), "ok");
        EXPECT_EQ(rows[1], int64_t{1 + turn / 2});
        EXPECT_EQ(got.size(), static_cast<size_t>(2 * (4 + 1 + turn / 2)));
      }
    });
  }
}

TEST(BroadcastFromEveryRoot) {
  for (const Kind& kind : Kinds()) {
    for (int size : {1, 2, 3, 5, 8}) {
      RunWorld(kind, size, [size](Engine& engine, int rank) {
        for (int root = 0; root < size; ++root) {
          for (size_t count : {0, 1, 7, 100003}) {
            if (PathsOnly() && size == 8 && count == 7) continue;
            for (bool apart : {false, true}) {
              std::vector<int16_t> data(count, static_cast<int16_t>(rank)), out(count, -1);
              Request request;
              request.name =
                  "b" + std::to_string(root) + "." + std::to_string(count) + (apart ? "a" : "");
              request.collective = Collective::kBroadcast;
              request.root = root;
              request.entries.push_back({DType::kInt16, {static_cast<int64_t>(count)}});
              const Part part{data.data(), apart ? out.data() : data.data(), count};
              EXPECT_EQ(Run(engine, request, {part}, root % 2 == 0).Report(), "ok");
              EXPECT((apart ? out : data) ==
                     std::vector<int16_t>(count, static_cast<int16_t>(root)));
              if (apart) EXPECT(data == std::vector<int16_t>(count, static_cast<int16_t>(rank)));
            }
          }
        }
      });
    }
  }
}

TEST(BarrierWaitsForEverybody) {
  for (const Kind& kind : {kInproc, kTcp}) {
    for (int size : {1, 2, 3, 8}) {
      std::atomic<int> arrived{0};
      RunWorld(kind, size, [&](Engine& engine, int rank) {
        for (int turn = 1; turn <= 20; ++turn) {
          if (rank == turn % size) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          arrived.fetch_add(1);
          EXPECT_EQ(BarrierOf(engine, "barrier").Report(), "ok");
          EXPECT(arrived.load() >= turn * size);
          EXPECT_EQ(BarrierOf(engine, "and out").Report(), "ok");
        }
      });
    }
  }
}

// The same name with the same shape is one bit of agreement; with another shape it is agreed upon
// anew.
TEST(NamesComeAgainWithOtherShapes) {
  for (const Kind& kind : Kinds()) {
    RunWorld(kind, 3, [](Engine& engine, int) {
      for (int turn = 0; turn < 30; ++turn) {
        const int64_t count = 10 + turn / 10 * 5000;
        std::vector<float> data(static_cast<size_t>(count), 1.0f);
        const Request request = AllreduceOf("again", DType::kFloat32, {count});
        EXPECT_EQ(Run(engine, request, {{data.data(), data.data(), data.size()}}).Report(), "ok");
        EXPECT(data == std::vector<float>(data.size(), 3.0f));
      }
      const Stats stats = engine.GetStats();
      EXPECT_EQ(stats.cache_hits, uint64_t{27});
      EXPECT_EQ(stats.cache_misses, uint64_t{3});
    });
  }
}

// A cache of four entries (and of none) for thirty names.
TEST(MoreNamesThanTheCacheHolds) {
  for (int64_t capacity : {0, 4}) {
    WorldOptions options;
    options.config.cache_capacity = capacity;
    RunWorld(
        kInproc, 3,
        [](Engine& engine, int rank) {
          for (int turn = 0; turn < 5; ++turn) {
            std::vector<std::vector<float>> tensors(30, std::vector<float>(9, 1.0f));
            std::vector<int64_t> handles(30);
            for (int i = 0; i < 30; ++i) {
              const int t = (i + rank * 10) % 30;  // another order on every rank
              const Request request = AllreduceOf("n" + std::to_string(t), DType::kFloat32, {9});
              handles[static_cast<size_t>(t)] =
                  Start(engine, request, tensors[static_cast<size_t>(t)].data());
            }
            for (int t = 0; t < 30; ++t) {
              EXPECT_EQ(End(engine, handles[static_cast<size_t>(t)]).Report(), "ok");
              EXPECT(tensors[static_cast<size_t>(t)] == std::vector<float>(9, 3.0f));
            }
          }
        },
        options);
  }
}

// Whatever fits the threshold meets in one call, and nothing beyond it; 0 fuses nothing.
TEST(FusionKeepsItsThreshold) {
  for (int64_t threshold : {0, 1000, 1 << 20}) {
    WorldOptions options;
    options.config.fusion_threshold = threshold;
    RunWorld(
        kTcp, 2,
        [threshold](Engine& engine, int) {
          for (int turn = 0; turn < 3; ++turn) {
            std::vector<std::vector<float>> tensors(20,
                                                    std::vector<float>(100, 2.0f));  // of 400 bytes
            std::vector<int64_t> handles;
            for (size_t t = 0; t < tensors.size(); ++t)
              handles.push_back(Start(engine,
                                      AllreduceOf("f" + std::to_string(t), DType::kFloat32, {100}),
                                      tensors[t].data()));
            for (size_t t = 0; t < tensors.size(); ++t) {
              EXPECT_EQ(End(engine, handles[t]).Report(), "ok");
              EXPECT(tensors[t] == std::vector<float>(100, 4.0f));
            }
          }
          const Stats::Carried carried = Carried(engine, "allreduce/");
          EXPECT_EQ(carried.tensors, uint64_t{60});
          EXPECT(threshold == 0 ? carried.calls == 60
                                : carried.calls >= (threshold == 1000 ? 30u : 1u));
        },
        options);
  }
}

// Submits and waits on several threads of each rank at once; the names pair them up across the
// ranks.
TEST(ManyThreadsOfOneRankShareItsEngine) {
  for (const Kind& kind : {kInproc, kTcp}) {
    RunWorld(kind, 2, [](Engine& engine, int rank) {
      std::vector<std::thread> callers;
      for (int caller = 0; caller < 4; ++caller) {
        callers.emplace_back([&engine, rank, caller] {
          for (int turn = 0; turn < 40; ++turn) {
            std::vector<float> data(static_cast<size_t>(1 + turn * 300),
                                    static_cast<float>(rank + caller));
            Request request = AllreduceOf("caller" + std::to_string(caller), DType::kFloat32,
                                          {static_cast<int64_t>(data.size())});
            const Part part{data.data(), data.data(), data.size()};
            EXPECT_EQ(Run(engine, request, {part}, (turn + caller) % 2 == 0).Report(), "ok");
            EXPECT(data == std::vector<float>(data.size(), static_cast<float>(2 * caller + 1)));
            if (turn % 10 == caller) engine.GetStats();
          }
        });
      }
      for (std::thread& caller : callers) caller.join();
    });
  }
}

TEST(EngineMemoryIsZeroedAlignedAndOutlivesItsEngine) {
  const Holdings holdings;
  std::shared_ptr<Memory> kept;
  WorldOptions options;
  options.check_left = false;  // what the kept memory needs stays until it goes
  RunWorld(
      kInproc, 2,
      [&](Engine& engine, int rank) {
        for (size_t bytes : {0, 1, 63, 4096, 1000000}) {
          for (int turn = 0; turn < 2; ++turn) {
            std::shared_ptr<Memory> memory;
            EXPECT_EQ(engine.Allocate(bytes, &memory).Report(), "ok");
            EXPECT_EQ(reinterpret_cast<uintptr_t>(memory->data()) % 64, size_t{0});
            EXPECT_EQ(memory->bytes(), bytes);
            bool zero = true;
            for (size_t i = 0; i < bytes; ++i) zero = zero && memory->data()[i] == 0;
            EXPECT(zero);
            if (bytes > 0) std::memset(memory->data(), 0x5a, bytes);  // the next must not see it
          }
        }
        std::shared_ptr<Memory> too_much;
        EXPECT(!engine.Allocate(size_t{1} << 40, &too_much).ok());
        if (rank == 0) EXPECT(engine.Allocate(100, &kept).ok());
      },
      options);
  std::memset(kept->data(), 1, kept->bytes());
  kept.reset();
  holdings.ExpectUnchanged(__FILE__, __LINE__);
}

}  // namespace
}  // namespace sparkvod
