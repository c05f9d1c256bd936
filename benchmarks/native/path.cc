// The engine's whole path from submission to completion, called from C++.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/native/modes.h"
#include "native/engine/engine.h"

namespace sparkvod::bench {
namespace {

// Below this, calls follow each other at once: what is measured is latency, which a barrier would
// hide.
constexpr size_t kLatencyBytes = 4 << 10;

void Check(const Result& result, const char* what) {
  if (!result.ok()) Fail(std::string(what) + ": " + result.Report());
}

}  // namespace

std::vector<double> Path(int size, size_t bytes, int calls, bool engine_memory) {
  const auto count = static_cast<int64_t>(bytes / sizeof(float));
  Ranks ranks(size, calls);
  return ranks.Run(false, [&](int rank) {
    std::unique_ptr<Engine> engine;
    std::string endpoint;
    Config config;
    config.address = "127.0.0.1";
    Check(Engine::Create(config, &engine), "create");
    Check(engine->Listen(&endpoint), "listen");
    Check(engine->Connect(rank, ranks.Gather(rank, endpoint), "of this bench"), "connect");

    std::shared_ptr<Memory> memory;
    if (engine_memory) Check(engine->Allocate(bytes, &memory), "allocate");
    auto* const data =
        reinterpret_cast<float*>(engine_memory ? memory->data() : PrivateMemory(bytes));
    Request request;
    request.name = "path";
    request.collective = Collective::kAllreduce;
    request.entries.push_back({DType::kFloat32, {count}});
    const std::vector<Part> parts = {{data, data, static_cast<size_t>(count)}};
    const auto call = [&] {
      int64_t handle = 0;
      Check(engine->Submit(request, parts, false, &handle), "submit");
      Check(engine->Wait(handle), "wait");
      engine->Release(handle);
    };
    const auto fill = [&] { std::fill_n(data, count, static_cast<float>(rank + 1)); };
    const auto sum = static_cast<float>(size * (size + 1) / 2);
    if (bytes < kLatencyBytes) {
      fill();
      call();
      Expect(data, static_cast<size_t>(count), sum, "path");
      std::fill_n(data, count, 0.0f);
      ranks.MeasureLatency(rank, call);
    } else {
      ranks.Measure(rank, fill, call);
      Expect(data, static_cast<size_t>(count), sum, "path");
    }
    memory.reset();
    Check(engine->Shutdown(), "shutdown");
  });
}

}  // namespace sparkvod::bench
