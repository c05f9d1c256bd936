// Knobs that change while the engine runs: on all ranks at once, in the middle of traffic, or not
// at all; lingering; samples of how fast it goes.
#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "tests/native/world.h"

namespace sparkvod {
namespace {

using namespace check;  // NOLINT: a test of what check's worlds run

constexpr int kStreams = 3;

WorldOptions WithStreams() {
  WorldOptions options;
  options.config.tcp_streams = kStreams;
  return options;
}

Request TuneTo(const Tunables& tunables, int by = kByAll) {
  Request request;
  request.name = "tune by " + std::to_string(by);
  request.collective = Collective::kTune;
  request.root = by;
  request.splits = Pack(tunables);
  return request;
}

// Different from one turn to the next in everything.
Tunables Values(int turn) {
  Tunables tunables;
  tunables.fusion_threshold = turn % 3 == 0 ? 0 : 1000 << turn % 5;
  tunables.linger_us = turn % 2 * 100;
  tunables.one_shot_bytes = turn % 4 * 4096;
  tunables.link_mbits = 10 + turn * 1000;
  tunables.tcp_streams = 1 + turn % kStreams;
  return tunables;
}

void ExpectTunables(Engine& engine, const Tunables& expected) {
  const std::vector<int64_t> found = Pack(engine.executor().tunables()), wanted = Pack(expected);
  for (size_t i = 0; i < wanted.size(); ++i) EXPECT_EQ(found[i], wanted[i]);
}

// Allreduces that are on their way at the same time; each is 1, 2, ... of every rank.
class Traffic {
 public:
  Traffic(Engine& engine, int turn) : engine_(engine) {
    const int rank = engine.topology().rank, size = engine.topology().size;
    for (size_t i = 0; i < std::size(kCounts); ++i) {
      data_.emplace_back(kCounts[i], static_cast<float>((rank + 1) * turn));
      sum_ = static_cast<float>(size * (size + 1) / 2 * turn);
    }
  }
  void Begin(size_t i) {
    handles_.push_back(Start(
        engine_,
        AllreduceOf("x" + std::to_string(i), DType::kFloat32, {static_cast<int64_t>(kCounts[i])}),
        data_[i].data()));
  }
  void Check() {
    for (const int64_t handle : handles_) EXPECT_EQ(End(engine_, handle).Report(), "ok");
    for (const auto& data : data_) EXPECT(data == std::vector<float>(data.size(), sum_));
  }
  static constexpr size_t kCounts[] = {1, 700, 2000, 150001, 5000, 300};

 private:
  Engine& engine_;
  std::vector<std::vector<float>> data_;
  std::vector<int64_t> handles_;
  float sum_ = 0;
};

TEST(TuneChangesAllRanksInTheMiddleOfTraffic) {
  for (const Kind& kind : Kinds())
    for (const int size : {2, 3, 5})
      RunWorld(
          kind, size,
          [size](Engine& engine, int rank) {
            for (int turn = 1; turn <= 6; ++turn) {
              // By all, by one of them while the others know nothing of it, or by two at once.
              const int by = turn % 3 == 0 ? kByAll : turn % size;
              Traffic traffic(engine, turn);
              for (size_t i = 0; i < 3; ++i) traffic.Begin(i);
              int64_t handle = 0;
              if (by == kByAll || by == rank)
                EXPECT(engine.Submit(TuneTo(Values(turn), by), {}, true, &handle).ok());
              for (size_t i = 3; i < std::size(Traffic::kCounts); ++i) traffic.Begin(i);
              if (handle != 0) EXPECT_EQ(End(engine, handle).Report(), "ok");
              traffic.Check();
              EXPECT_EQ(BarrierOf(engine, "all").Report(), "ok");
              ExpectTunables(engine, Values(turn));
              // A rank that is ahead changes the others' again, which may not have looked yet.
              EXPECT_EQ(BarrierOf(engine, "looked").Report(), "ok");
            }
          },
          WithStreams());
}

TEST(TuneThatDiffersChangesNothing) {
  for (const Kind& kind : Kinds())
    for (const int size : {2, 3, 5})
      RunWorld(
          kind, size,
          [size](Engine& engine, int rank) {
            const Tunables before = engine.executor().tunables();
            Traffic traffic(engine, 1);
            for (size_t i = 0; i < 3; ++i) traffic.Begin(i);
            const Result differs = Run(engine, TuneTo(Values(rank == size - 1 ? 2 : 1)), {});
            EXPECT(differs.code() == Code::kMismatch);
            EXPECT_CONTAINS(differs.Report(), "rank " + std::to_string(size - 1) + " sent tune to");
            EXPECT_CONTAINS(differs.Report(), "linger_us=100");
            for (size_t i = 3; i < std::size(Traffic::kCounts); ++i) traffic.Begin(i);
            traffic.Check();
            ExpectTunables(engine, before);
            EXPECT_EQ(Run(engine, TuneTo(Values(4)), {}).Report(), "ok");
            ExpectTunables(engine, Values(4));
          },
          WithStreams());
}

TEST(TuneRefusesWhatCannotBe) {
  RunWorld(
      kTcp, 2,
      [](Engine& engine, int rank) {
        const Tunables before = engine.executor().tunables();
        Tunables wrong = before;
        wrong.tcp_streams = kStreams + 1;
        EXPECT_CONTAINS(Run(engine, TuneTo(wrong), {}).Report(),
                        "tcp_streams=4 was found, at most the 3 that are connected");
        wrong = before;
        wrong.linger_us = -1;
        EXPECT_CONTAINS(Run(engine, TuneTo(wrong, rank), {}).Report(),
                        "linger_us=-1 was found, a value from 0 to 1000000");
        Request few = TuneTo(before);
        few.splits.pop_back();
        EXPECT_CONTAINS(Run(engine, few, {}).Report(), "4 values to tune were found, 5");
        ExpectTunables(engine, before);
        EXPECT_EQ(BarrierOf(engine, "all").Report(), "ok");
      },
      WithStreams());
}

TEST(TuneReachesRanksThatHaveJoined) {
  RunWorld(kInproc, 3, [](Engine& engine, int rank) {
    if (rank == 0) {
      for (const int by : {0, kByAll}) {
        const Result tuned = Run(engine, TuneTo(Values(by == 0 ? 3 : 6), by), {});
        EXPECT_EQ(tuned.Report(), "ok");
      }
      Traffic traffic(engine, 0);
      for (size_t i = 0; i < std::size(Traffic::kCounts); ++i) traffic.Begin(i);
      traffic.Check();
    }
    Request join;
    join.name = "join";
    join.collective = Collective::kJoin;
    EXPECT_EQ(Run(engine, join, {}).Report(), "ok");
    ExpectTunables(engine, Values(6));
  });
}

// Also in process sets: those that are there, and those to come.
TEST(TuneDecidesWhatCarries) {
  RunWorld(kInproc, 2, [](Engine& engine, int rank) {
    std::vector<float> data(1000, static_cast<float>(rank));
    Tunables tunables = engine.executor().tunables();
    const auto carried = [&](const std::string& algorithm) {
      const std::string key = "allreduce/inproc/" + algorithm;
      const uint64_t before = Carried(engine, key).calls;
      EXPECT_EQ(
          Run(engine, AllreduceOf("x", DType::kFloat32, {1000}), {{data.data(), data.data(), 1000}})
              .Report(),
          "ok");
      return Carried(engine, key).calls - before;
    };
    EXPECT_EQ(carried("one-shot"), 1u);
    tunables.one_shot_bytes = 100;
    EXPECT_EQ(Run(engine, TuneTo(tunables), {}).Report(), "ok");
    EXPECT_EQ(carried("staged"), 1u);
    tunables.one_shot_bytes = 4096;
    EXPECT_EQ(Run(engine, TuneTo(tunables), {}).Report(), "ok");
    EXPECT_EQ(carried("one-shot"), 1u);
  });
  RunWorld(kInproc, 3, [](Engine& engine, int rank) {
    Request request;
    request.name = "add";
    request.collective = Collective::kAddSet;
    Tunables tunables = engine.executor().tunables();
    int32_t set = 0;
    for (const int64_t other : {1, 2}) {
      request.splits = {0, other};
      EXPECT_EQ(Run(engine, request, {}).Report(), "ok");
      tunables.one_shot_bytes = 100;
      EXPECT_EQ(Run(engine, TuneTo(tunables), {}).Report(), "ok");
      ++set;
      if (rank != 0 && rank != other) continue;
      std::vector<float> data(1000, 1.0f);
      Request sum = AllreduceOf("x", DType::kFloat32, {1000});
      sum.process_set = set;
      const uint64_t before = Carried(engine, "allreduce/inproc/staged").calls;
      EXPECT_EQ(Run(engine, sum, {{data.data(), data.data(), 1000}}).Report(), "ok");
      EXPECT_EQ(data[999], 2.0f);
      EXPECT_EQ(Carried(engine, "allreduce/inproc/staged").calls - before, 1u);
    }
    // Whoever is none of the last set would else end the world of those who still sum in it.
    EXPECT_EQ(BarrierOf(engine, "end").Report(), "ok");
  });
}

TEST(TuneKnowsWhatMakesADifference) {
  const auto names = [](Engine& engine) {
    std::string text;
    for (const Tunable& t : engine.executor().in_effect())
      text += std::string(text.empty() ? "" : " ") + t.name;
    return text;
  };
  RunWorld(kInproc, 1, [&](Engine& engine, int) { EXPECT_EQ(names(engine), ""); });
  RunWorld(kInproc, 2, [&](Engine& engine, int) {
    EXPECT_EQ(names(engine), "fusion_threshold linger_us one_shot_bytes");
  });
  RunWorld(kTcp, 2, [&](Engine& engine, int) {
    EXPECT_EQ(names(engine), "fusion_threshold linger_us link_mbits");
  });
  RunWorld(
      kTcp, 2,
      [&](Engine& engine, int) {
        EXPECT_EQ(names(engine), "fusion_threshold linger_us link_mbits tcp_streams");
        EXPECT_EQ(engine.executor().in_effect().back().most, kStreams);
      },
      WithStreams());
}

// What is submitted while the background thread lingers shares its cycle; a caller that waits is
// not kept waiting.
TEST(LingerFusesWhatComesLater) {
  WorldOptions options;
  options.config.linger_us = 1000000;
  RunWorld(
      kInproc, 2,
      [](Engine& engine, int) {
        // The machine may keep it waiting now and then, lingering would each time.
        std::chrono::duration<double> shortest{1e9};
        uint64_t fewest = 20;
        for (int turn = 0; turn < 3; ++turn) {
          EXPECT_EQ(BarrierOf(engine, "few bytes").Report(), "ok");
          const auto began = std::chrono::steady_clock::now();
          std::vector<std::vector<float>> data(20, std::vector<float>(10, 1.0f));
          std::vector<int64_t> handles;
          const uint64_t before = Carried(engine, "allreduce").calls;
          for (size_t i = 0; i < data.size(); ++i) {
            const std::string name = "x" + std::to_string(i);
            handles.push_back(
                Start(engine, AllreduceOf(name, DType::kFloat32, {10}), data[i].data()));
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
          }
          for (const int64_t handle : handles) EXPECT_EQ(End(engine, handle).Report(), "ok");
          shortest = std::min<std::chrono::duration<double>>(
              shortest, std::chrono::steady_clock::now() - began);
          for (const auto& d : data) EXPECT(d == std::vector<float>(10, 2.0f));
          fewest = std::min(fewest, Carried(engine, "allreduce").calls - before);
        }
        EXPECT(fewest <= 4);
        if (shortest.count() > 0.9) Fail(__FILE__, __LINE__, "a waiter was kept waiting");
      },
      options);
}

TEST(MeterTakesSamplesOfWholeSteps) {
  RunWorld(kInproc, 2, [](Engine& engine, int) {
    Meter& meter = engine.executor().meter();
    std::vector<float> data(100);
    const auto step = [&](const std::string& only = "") {
      for (const char* name : {"a", "b"})
        EXPECT_EQ(Run(engine, AllreduceOf(name + only, DType::kFloat32, {100}),
                      {{data.data(), data.data(), 100}})
                      .Report(),
                  "ok");
    };
    Sample sample;
    step();
    EXPECT(!meter.Next(0, &sample));
    meter.Start(3);
    for (int i = 0; i < 3; ++i) step();
    EXPECT(!meter.Next(0, &sample));
    step();
    EXPECT(meter.Next(5, &sample));
    EXPECT_EQ(sample.bytes, 3u * 2 * 400);
    EXPECT(sample.ns > 0);
    EXPECT(!meter.Next(0, &sample));
    // Names that never come again end nothing, and a change begins anew.
    for (int i = 0; i < 9; ++i) step(std::to_string(i));
    step();
    step();
    EXPECT_EQ(Run(engine, TuneTo(engine.executor().tunables()), {}).Report(), "ok");
    for (int i = 0; i < 3; ++i) step();
    EXPECT(!meter.Next(0, &sample));
    step();
    EXPECT(meter.Next(5, &sample));
    EXPECT_EQ(sample.bytes, 3u * 2 * 400);
    meter.Start(0);
    for (int i = 0; i < 9; ++i) step();
    EXPECT(!meter.Next(10, &sample));
  });
}

}  // namespace
}  // namespace sparkvod
