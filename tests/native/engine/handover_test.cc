// Between the callers that drive and the background thread: who looks after what nobody drives, and
// who is told of what comes meanwhile.
#include <chrono>
#include <string>
#include <thread>

#include "native/base/clock.h"
#include "tests/native/world.h"

namespace sparkvod {
namespace {

using namespace check;  // NOLINT: a test of what check's worlds run

void Sleep(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// Looks now and then, without calling anything that drives.
bool Comes(const std::function<bool()>& what, double seconds) {
  const Deadline deadline = Deadline::After(seconds);
  while (!what() && !deadline.Passed()) Sleep(5);
  return what();
}

// When the background thread went to sleep nothing was pending, and nobody has woken it since.
TEST(WhatAShortWaitLeftPendingTimesOut) {
  WorldOptions options;
  options.config.collective_timeout = 0.4;
  options.shutdown = false;
  RunWorld(
      kInproc, 2,
      [](Engine& engine, int rank) {
        EXPECT_EQ(BarrierOf(engine, "before").Report(), "ok");
        if (rank == 1) return Sleep(2500);
        Sleep(200);
        float data = 1;
        int64_t handle = 0;
        const Request never = AllreduceOf("never", DType::kFloat32, {1});
        EXPECT(engine.Submit(never, {{&data, &data, 1}}, false, &handle).ok());
        EXPECT(engine.Wait(handle, 0.02).code() == Code::kTimeout);
        bool done = false;
        EXPECT(Comes([&] { return engine.Poll(handle, &done).ok() && done; }, 2));
        if (done) EXPECT_CONTAINS(End(engine, handle).Report(), "'never'");
      },
      options);
}

TEST(AShutdownWakesTheCallerThatDrives) {
  WorldOptions options;
  options.shutdown = false;
  RunWorld(
      kInproc, 2,
      [](Engine& engine, int rank) {
        EXPECT_EQ(BarrierOf(engine, "before").Report(), "ok");
        if (rank == 1) {
          EXPECT(Comes([&] { return !engine.running(); }, 20));
          return;
        }
        float data = 1;
        const Request never = AllreduceOf("never", DType::kFloat32, {1});
        const int64_t handle = Start(engine, never, &data);
        Result result;
        std::thread waiter([&] { result = engine.Wait(handle); });
        Sleep(200);
        const int64_t began_ns = NowNs();
        EXPECT_EQ(engine.Shutdown().Report(), "ok");
        waiter.join();
        EXPECT(NowNs() - began_ns < 3000000000);
        EXPECT_EQ(result.Report(), "the engine was shut down");
      },
      options);
}

// Just after a collective the background thread looks by itself whether there is work; that a rank
// leaves is none, and is told but once.
TEST(AnAbortIsHeardThatComesJustAfterACollective) {
  WorldOptions options;
  options.shutdown = false;
  for (int turn = 0; turn < 5; ++turn)
    RunWorld(
        kInproc, 2,
        [](Engine& engine, int rank) {
          EXPECT_EQ(BarrierOf(engine, "last").Report(), "ok");
          if (rank == 1) return engine.Abort("it has had enough");
          EXPECT(Comes([&] { return !engine.running(); }, 2));
        },
        options);
}

}  // namespace
}  // namespace sparkvod
