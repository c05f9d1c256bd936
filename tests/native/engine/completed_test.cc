// Collectives that call back when they have ended, as ops of graph frameworks submit them.
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "tests/native/world.h"

namespace sparkvod {
namespace {

using namespace check;  // NOLINT: a test of what check's worlds run

bool Within10Seconds(const std::atomic<int>& counter, int wanted) {
  for (int k = 0; k < 10000 && counter.load() < wanted; ++k)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return counter.load() == wanted;
}

TEST(CallbacksComeOnceAndMaySubmit) {
  for (const Kind& kind : {kInproc, kTcp})
    RunWorld(kind, 3, [&](Engine& engine, int) {
      constexpr int kMany = 50;
      std::vector<float> first(kMany, 1.0f), second(kMany, 1.0f);
      std::atomic<int> ended{0}, well{0};
      for (int k = 0; k < kMany; ++k) {
        float* data = &first[static_cast<size_t>(k)];
        float* again = &second[static_cast<size_t>(k)];
        const auto name = std::to_string(k);
        const Result submitted = engine.Submit(
            AllreduceOf(name, DType::kFloat32, {1}), {{data, data, 1}},
            [&engine, &ended, &well, name, again](const Operation& operation) {
              well += operation.result.ok() ? 1 : 0;
              ++ended;
              const Result next = engine.Submit(AllreduceOf("after" + name, DType::kFloat32, {1}),
                                                {{again, again, 1}}, [&](const Operation& o) {
                                                  well += o.result.ok() ? 1 : 0;
                                                  ++ended;
                                                });
              EXPECT_EQ(next.Report(), "ok");
            });
        EXPECT_EQ(submitted.Report(), "ok");
      }
      EXPECT(Within10Seconds(ended, 2 * kMany));
      EXPECT_EQ(well.load(), 2 * kMany);
      for (const float value : first) EXPECT_EQ(value, 3.0f);
      for (const float value : second) EXPECT_EQ(value, 3.0f);
      EXPECT_EQ(BarrierOf(engine, "all").Report(), "ok");
    });
}

TEST(CallbacksComeWhenTheEngineEnds) {
  WorldOptions options;
  options.shutdown = false;
  std::atomic<int> there{0};
  RunWorld(
      kInproc, 2,
      [&](Engine& engine, int rank) {
        std::atomic<int> ended{0};
        float value = 0;
        if (rank == 0) {
          const Result submitted = engine.Submit(AllreduceOf("alone", DType::kFloat32, {1}),
                                                 {{&value, &value, 1}}, [&](const Operation& o) {
                                                   EXPECT(!o.result.ok());
                                                   ++ended;
                                                 });
          EXPECT_EQ(submitted.Report(), "ok");
          ++there;
        }
        EXPECT(Within10Seconds(there, 1));  // a rank that shuts down earlier ends both engines
        EXPECT(engine.Shutdown().ok());
        EXPECT_EQ(ended.load(), rank == 0 ? 1 : 0);
        EXPECT(!engine
                    .Submit(AllreduceOf("late", DType::kFloat32, {1}), {{&value, &value, 1}},
                            [&](const Operation&) { ++ended; })
                    .ok());
      },
      options);
}

}  // namespace
}  // namespace sparkvod
