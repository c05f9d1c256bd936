// Mismatches, lost peers, late peers, ends: each with its story, and nothing left behind.
#include <unistd.h>

#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include "native/base/clock.h"
#include "tests/native/world.h"

namespace sparkvod {
namespace {

using namespace check;  // NOLINT: a test of what check's worlds run

// Submits what this rank has and returns how it ended.
Result Submitted(Engine& engine, const Request& request) {
  std::vector<std::vector<double>> memory;
  std::vector<Part> parts;
  for (const Entry& entry : request.entries) {
    memory.emplace_back(static_cast<size_t>(entry.count()));
    parts.push_back(
        {memory.back().data(), memory.back().data(), static_cast<size_t>(entry.count())});
  }
  return Run(engine, request, parts);
}

void ExpectWorking(Engine& engine, const std::string& name) {
  std::vector<float> data(2000, 1.0f);
  const Request request = AllreduceOf(name, DType::kFloat32, {2000});
  EXPECT_EQ(Run(engine, request, {{data.data(), data.data(), 2000}}).Report(), "ok");
  EXPECT_EQ(data[1999], static_cast<float>(engine.topology().size));
}

TEST(MismatchesNameTheRanksAndTheEngineGoesOn) {
  for (const Kind& kind : Kinds()) {
    RunWorld(kind, 3, [](Engine& engine, int rank) {
      const bool odd = rank == 1;
      const Request plain = AllreduceOf("layer1.weight", DType::kFloat32, {8, 4});
      Request shape = plain, dtype = plain, op = plain, other = plain, scale = plain;
      shape.entries[0].shape = {8, 5};
      dtype.entries[0].dtype = DType::kFloat64;
      op.op = ReduceOp::kAverage;
      other.collective = Collective::kBroadcast;
      scale.prescale = 0.5;
      struct Odd {
        Request request;
        const char* says;
      };
      for (const Odd& sent :
           {Odd{shape, "rank 1 sent allreduce (sum) of float32 [8,5]"},
            Odd{dtype, "rank 1 sent allreduce (sum) of float64 [8,4]"},
            Odd{op, "rank 1 sent allreduce (average) of float32 [8,4]"},
            Odd{other, "rank 1 sent broadcast (root 0) of float32 [8,4]"},
            Odd{scale, "rank 1 sent allreduce (sum) of float32 [8,4] scaled by 0.5"}}) {
        const Result result = Submitted(engine, odd ? sent.request : plain);
        EXPECT(result.code() == Code::kMismatch);
        EXPECT_CONTAINS(result.Report(), "'layer1.weight'");
        EXPECT_CONTAINS(result.Report(), "ranks 0,2 sent allreduce (sum) of float32 [8,4]");
        EXPECT_CONTAINS(result.Report(), sent.says);
        EXPECT_EQ(Submitted(engine, plain).Report(), "ok");
      }
      // Also against what was cached before.
      EXPECT_EQ(Submitted(engine, plain).Report(), "ok");
      EXPECT(Submitted(engine, odd ? shape : plain).code() == Code::kMismatch);
      EXPECT_EQ(Submitted(engine, plain).Report(), "ok");

      Request gather = AllreduceOf("g", DType::kFloat32, {rank + 1, odd ? 3 : 4});
      gather.collective = Collective::kAllgather;
      EXPECT(Submitted(engine, gather).code() == Code::kMismatch);
      ExpectWorking(engine, "after");
    });
  }
}

TEST(MistakesOfTheCallerAreRefusedAtOnce) {
  RunWorld(kInproc, 2, [](Engine& engine, int rank) {
    float data[4] = {1, 1, 1, 1};
    const Request request = AllreduceOf("x", DType::kFloat32, {4});
    int64_t first = 0, second = 0;
    if (rank == 0) {
      EXPECT(engine.Submit(request, {{data, data, 4}}, true, &first).ok());
      const Result twice = engine.Submit(request, {{data, data, 4}}, true, &second);
      EXPECT(twice.code() == Code::kInvalid);
      EXPECT_CONTAINS(twice.Report(), "'x'");
    }
    Request bytes = AllreduceOf("u", DType::kBool, {4}, ReduceOp::kAverage),
            far = AllreduceOf("f", DType::kFloat32, {4});
    EXPECT(engine.Submit(bytes, {{data, data, 4}}, true, &second).code() == Code::kInvalid);
    far.collective = Collective::kBroadcast;
    far.root = 2;
    EXPECT(engine.Submit(far, {{data, data, 4}}, true, &second).code() == Code::kInvalid);
    Request scalar = AllreduceOf("s", DType::kFloat32, {});
    scalar.collective = Collective::kAllgather;
    EXPECT(engine.Submit(scalar, {{data, nullptr, 1}}, true, &second).code() == Code::kInvalid);
    // What the others would take for damage, and the world with it.
    for (const std::vector<int64_t>& shape :
         {std::vector<int64_t>{0, int64_t{1} << 50}, std::vector<int64_t>(65, 1)}) {
      Request far_too_large = AllreduceOf("l", DType::kFloat32, shape);
      far_too_large.collective = Collective::kAllgather;
      const Result refused = engine.Submit(far_too_large, {{data, nullptr, 0}}, true, &second);
      EXPECT(refused.code() == Code::kInvalid);
      EXPECT_CONTAINS(refused.Report(), "'l' is allgather of float32 [");
    }
    // What is rounded up must not begin again at 0.
    for (const size_t bytes : {SIZE_MAX, SIZE_MAX - 100, SIZE_MAX / 2}) {
      std::shared_ptr<Memory> memory;
      const Result refused = engine.Allocate(bytes, &memory);
      EXPECT(refused.code() == Code::kSystem);
      EXPECT_CONTAINS(refused.Report(), "no room for " + std::to_string(bytes) + " bytes");
    }
    EXPECT(engine.Wait(12345).code() == Code::kInvalid);
    engine.Release(12345);
    std::string endpoint;
    EXPECT(engine.Listen(&endpoint).code() == Code::kInvalid);
    EXPECT(engine.Connect(0, {"x"}, "s").code() == Code::kInvalid);
    if (rank == 1) EXPECT(engine.Submit(request, {{data, data, 4}}, true, &first).ok());
    EXPECT_EQ(End(engine, first).Report(), "ok");
    EXPECT_EQ(data[3], 2.0f);
  });
}

TEST(AnEngineThatDidNotConnect) {
  const Holdings holdings;
  {
    std::unique_ptr<Engine> engine;
    EXPECT(Engine::Create(TestConfig(), &engine).ok());
    float x = 1;
    int64_t handle = 0;
    std::shared_ptr<Memory> memory;
    const Request request = AllreduceOf("x", DType::kFloat32, {1});
    EXPECT(engine->Submit(request, {{&x, &x, 1}}, true, &handle).code() == Code::kInvalid);
    EXPECT(!engine->Allocate(10, &memory).ok());
    engine->Abort("nothing to abort");
    std::string endpoint;
    EXPECT(engine->Listen(&endpoint).ok());
    EXPECT(engine->Shutdown().ok());
    EXPECT(engine->Shutdown().ok());
    EXPECT(!engine->Submit(request, {{&x, &x, 1}}, true, &handle).ok());
  }
  holdings.ExpectUnchanged(__FILE__, __LINE__);
}

// A rank does not come: the others are told which, and what it should have submitted.
TEST(ALateRankIsNamed) {
  for (const Kind& kind : {kInproc, kTcp}) {
    // What was agreed on before is but one bit at first; who is late must be found out all the
    // same.
    for (const char* name : {"agreed before", "new"}) {
      WorldOptions options;
      options.config.collective_timeout = 0.6;
      options.shutdown = false;
      RunWorld(
          kind, 3,
          [name](Engine& engine, int rank) {
            ExpectWorking(engine, "agreed before");
            if (rank == 2) return std::this_thread::sleep_for(std::chrono::milliseconds(1500));
            const int64_t start = NowNs();
            const Result result = Submitted(engine, AllreduceOf(name, DType::kFloat32, {2000}));
            EXPECT(result.code() == Code::kTimeout);
            EXPECT_CONTAINS(result.Report(), std::string("'") + name + "'");
            EXPECT_CONTAINS(result.Report(), "rank 2");
            EXPECT((NowNs() - start) * 1e-9 < 1.4);
          },
          options);
    }
  }
}

TEST(WaitingMayTimeOutAndGoOn) {
  RunWorld(kInproc, 2, [](Engine& engine, int rank) {
    float data = 1;
    const Request request = AllreduceOf("slow", DType::kFloat32, {1});
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    const int64_t handle = Start(engine, request, &data);
    if (rank == 0) EXPECT(engine.Wait(handle, 0.02).code() == Code::kTimeout);
    EXPECT_EQ(End(engine, handle).Report(), "ok");
    EXPECT_EQ(data, 2.0f);
  });
}

// A caller that has waited for a while and then only asks is told all the same that a rank is late.
TEST(WhatAWaitLeftPendingTimesOut) {
  WorldOptions options;
  options.config.collective_timeout = 0.6;
  options.shutdown = false;
  RunWorld(
      kInproc, 2,
      [](Engine& engine, int rank) {
        ExpectWorking(engine, "before");
        if (rank == 1) return std::this_thread::sleep_for(std::chrono::milliseconds(2500));
        float data = 1;
        const int64_t handle = Start(engine, AllreduceOf("never", DType::kFloat32, {1}), &data);
        // Long enough for the background thread to find out that the caller drives.
        EXPECT(engine.Wait(handle, 0.4).code() == Code::kTimeout);
        bool done = false;
        const Deadline deadline = Deadline::After(2);
        while (!done && !deadline.Passed()) {
          std::this_thread::sleep_for(std::chrono::milliseconds(10));
          EXPECT(engine.Poll(handle, &done).ok());
        }
        EXPECT(done);
        EXPECT_CONTAINS(End(engine, handle).Report(), "'never' (allreduce (sum) of float32 [1])");
      },
      options);
}

// Rank 1 leaves without a word while the others wait for it; `how` is what the leaving rank does.
void OneLeaves(const Kind& kind, const std::function<void(Engine&)>& how, const std::string& says,
               std::vector<int> killed = {}) {
  WorldOptions options;
  options.shutdown = false;
  options.killed = std::move(killed);
  RunWorld(
      kind, 3,
      [&](Engine& engine, int rank) {
        ExpectWorking(engine, "before");
        if (rank == 1) {
          std::this_thread::sleep_for(std::chrono::milliseconds(100));
          return how(engine);
        }
        std::vector<float> data(100000);
        const Request request = AllreduceOf("grad", DType::kFloat32, {100000});
        const int64_t handle = Start(engine, request, data.data());
        const int64_t start = NowNs();
        const Result result = engine.Wait(handle);
        EXPECT((NowNs() - start) * 1e-9 < 1.0);
        EXPECT(result.code() == Code::kPeerLost);
        EXPECT_CONTAINS(result.Report(), "rank 1");
        EXPECT_CONTAINS(result.Report(), says);
        // What comes later fails at once, with the same story.
        int64_t later = 0;
        const Result after =
            engine.Submit(request, {{data.data(), data.data(), data.size()}}, true, &later);
        EXPECT(after.code() == Code::kPeerLost);
        EXPECT_CONTAINS(after.Report(), "rank 1");
        engine.Release(handle);
        EXPECT(engine.Shutdown().ok());
      },
      options);
}

TEST(ARankThatAbortsIsNamedWithItsReason) {
  for (const Kind& kind : Kinds())
    OneLeaves(
        kind, [](Engine& engine) { engine.Abort("ValueError: no such column"); }, "no such column");
}

TEST(ARankWhoseEngineIsDestroyedIsNamed) {
  for (const Kind& kind : {kInproc, kTcp}) OneLeaves(kind, [](Engine&) {}, "destroyed");
}

TEST(ARankThatIsKilledIsNamed) {
  if (!CanFork()) return;
  for (const char* transport : {"shm", "tcp"})
    OneLeaves(Kind{transport, true}, [](Engine&) { ::raise(SIGKILL); }, "", {1});
}

// Killed in the middle of large collectives, at some moment.
TEST(ARankThatIsKilledInACollectiveIsNamed) {
  if (!CanFork()) return;
  for (const char* transport : {"shm", "tcp"}) {
    for (int delay_ms : {3, 11}) {
      WorldOptions options;
      options.shutdown = false;
      options.killed = {1};
      RunWorld(
          Kind{transport, true}, 3,
          [delay_ms](Engine& engine, int rank) {
            ExpectWorking(engine, "before");
            std::thread killer;
            if (rank == 1) {
              killer = std::thread([delay_ms] {
                std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
                ::kill(::getpid(), SIGKILL);
              });
            }
            std::vector<float> data(3000000);
            const Request request = AllreduceOf("grad", DType::kFloat32, {3000000});
            Result result;
            const Deadline deadline = Deadline::After(20);
            for (int turn = 0; result.ok() && !deadline.Passed(); ++turn) {
              // What is agreed on by a bit, beside something new in the same cycle: neither is
              // lost.
              float small = 1;
              const std::string name = "new" + std::to_string(turn);
              const Request other = AllreduceOf(name, DType::kFloat32, {1});
              int64_t handle = 0, also = 0;
              result = engine.Submit(other, {{&small, &small, 1}}, false, &also);
              if (!result.ok()) break;
              result =
                  engine.Submit(request, {{data.data(), data.data(), data.size()}}, false, &handle);
              if (result.ok()) result = End(engine, handle);
              const Result second = End(engine, also);
              if (result.ok()) result = second;
              EXPECT(second.ok() || second.code() == Code::kPeerLost);
            }
            if (killer.joinable()) killer.join();
            EXPECT(result.code() == Code::kPeerLost);
            EXPECT_CONTAINS(result.Report(), "rank 1");
          },
          options);
    }
  }
}

// A world at rest learns of a death too: the next call fails at once instead of waiting.
TEST(AnIdleWorldLearnsOfADeath) {
  if (!CanFork()) return;
  for (const char* transport : {"shm", "tcp"}) {
    WorldOptions options;
    options.shutdown = false;
    options.killed = {0};
    RunWorld(
        Kind{transport, true}, 2,
        [](Engine& engine, int rank) {
          ExpectWorking(engine, "before");
          if (rank == 0) ::raise(SIGKILL);
          std::this_thread::sleep_for(std::chrono::milliseconds(300));
          float data = 1;
          int64_t handle = 0;
          const Result result = engine.Submit(AllreduceOf("x", DType::kFloat32, {1}),
                                              {{&data, &data, 1}}, true, &handle);
          EXPECT(result.code() == Code::kPeerLost);
          EXPECT_CONTAINS(result.Report(), "rank 0");
        },
        options);
  }
}

TEST(ShutdownFailsWhatIsPending) {
  for (const Kind& kind : Kinds()) {
    RunWorld(kind, 3, [](Engine& engine, int rank) {
      ExpectWorking(engine, "before");
      float data = 1;
      int64_t handle = 0;
      if (rank != 2) {
        // Rank 2 never submits this; its shutdown ends the wait of the others.
        const Result submitted = engine.Submit(AllreduceOf("pending", DType::kFloat32, {1}),
                                               {{&data, &data, 1}}, true, &handle);
        const Result result = submitted.ok() ? End(engine, handle) : submitted;
        EXPECT(result.code() == Code::kShutDown);
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      }
      EXPECT(engine.Shutdown().ok());
      EXPECT(
          engine
              .Submit(AllreduceOf("late", DType::kFloat32, {1}), {{&data, &data, 1}}, true, &handle)
              .code() == Code::kShutDown);
    });
  }
}

// Abort from another thread ends a wait; so does an interrupt.
TEST(AWaitIsEndedFromOutside) {
  for (bool interrupt : {false, true}) {
    WorldOptions options;
    options.shutdown = false;
    RunWorld(
        kInproc, 2,
        [interrupt](Engine& engine, int rank) {
          ExpectWorking(engine, "before");
          if (rank == 1) {
            std::this_thread::sleep_for(std::chrono::milliseconds(700));
            return;
          }
          float data = 1;
          const int64_t handle = Start(engine, AllreduceOf("never", DType::kFloat32, {1}), &data);
          const int64_t start = NowNs();
          const auto late = [start] { return (NowNs() - start) * 1e-9 > 0.1; };
          std::thread other;
          if (!interrupt) {
            other = std::thread([&engine] {
              std::this_thread::sleep_for(std::chrono::milliseconds(100));
              engine.Abort("told so by another thread");
            });
          }
          const Result result =
              engine.Wait(handle, -1, interrupt ? Interrupted(late) : Interrupted());
          EXPECT(!result.ok());
          EXPECT((NowNs() - start) * 1e-9 < 0.6);
          if (other.joinable()) other.join();
          engine.Release(handle);
        },
        options);
  }
}

// Worlds one after the other in one process: RunWorld sees that nothing is left of any.
TEST(WorldsComeAndGo) {
  for (int turn = 0; turn < 20; ++turn) {
    WorldOptions options;
    options.shutdown = turn % 2 == 0;  // half of them end without a word
    RunWorld(
        turn % 3 == 0 ? kTcp : kInproc, 3,
        [&options](Engine& engine, int) {
          ExpectWorking(engine, "x");
          // Who leaves without a word may fail those that are still about to end the barrier.
          const Result end = BarrierOf(engine, "end");
          EXPECT(end.ok() || !options.shutdown);
        },
        options);
  }
}

}  // namespace
}  // namespace sparkvod
