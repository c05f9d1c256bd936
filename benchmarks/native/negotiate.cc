// The control plane alone: worlds of threads agree on tensors without elements, so no data is
// moved.
#include <sys/resource.h>

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "benchmarks/native/modes.h"
#include "native/base/clock.h"
#include "native/engine/engine.h"

namespace sparkvod::bench {
namespace {

void Check(const Result& result) {
  if (!result.ok()) Fail("negotiate: " + result.Report());
}

// Threads outnumber the cores by far, so they sleep at their barriers.
class Gate {
 public:
  explicit Gate(int size) : size_(size) {}
  void Pass() {
    std::unique_lock<std::mutex> lock(mu_);
    const int round = round_;
    if (++here_ == size_) {
      here_ = 0;
      ++round_;
      all_.notify_all();
    } else {
      all_.wait(lock, [&] { return round_ != round; });
    }
  }

 private:
  const int size_;
  std::mutex mu_;
  std::condition_variable all_;
  int here_ = 0, round_ = 0;
};

double CpuSeconds() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

}  // namespace

Negotiated Negotiate(int size, int worlds, int tensors, int calls) {
  const int threads_in_all = size * worlds;
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  // Four a rank, and two with which it listens; the soft limit is often 1,024.
  const auto need = static_cast<rlim_t>(6 * threads_in_all + 64);
  files.rlim_cur = std::max(files.rlim_cur, std::min(files.rlim_max, need));
  ::setrlimit(RLIMIT_NOFILE, &files);
  Gate gate(threads_in_all);
  std::vector<std::vector<std::string>> all_endpoints(
      static_cast<size_t>(worlds), std::vector<std::string>(static_cast<size_t>(size)));
  Negotiated result{};
  const auto body = [&](int thread) {
    const int rank = thread % size;
    std::vector<std::string>& endpoints = all_endpoints[static_cast<size_t>(thread / size)];
    Config config;
    config.address = "127.0.0.1";
    config.arena_bytes = 16 << 20;
    config.staging_bytes = 64 << 10;
    std::unique_ptr<Engine> engine;
    Check(Engine::Create(config, &engine));
    Check(engine->Listen(&endpoints[static_cast<size_t>(rank)]));
    gate.Pass();
    Check(engine->Connect(rank, endpoints, "of this bench"));
    std::vector<Request> requests;
    for (int t = 0; t < tensors; ++t) {
      Request request;
      request.name = "gradient." + std::to_string(t);
      request.entries.push_back({DType::kFloat32, {0}});
      requests.push_back(request);
    }
    std::vector<int64_t> handles(requests.size());
    for (int c = -2; c < calls; ++c) {  // the first fills the cache
      for (size_t t = 0; t < requests.size(); ++t)
        Check(engine->Submit(requests[t], {{nullptr, nullptr, 0}}, false, &handles[t]));
      gate.Pass();
      const double cpu = thread == 0 ? CpuSeconds() : 0;
      const int64_t began = NowNs();
      for (const int64_t handle : handles) Check(engine->Wait(handle));
      gate.Pass();
      if (thread == 0 && c >= 0) {
        result.seconds.push_back(1e-9 * static_cast<double>(NowNs() - began));
        result.cpu_seconds_per_rank.push_back((CpuSeconds() - cpu) / threads_in_all);
      }
      for (const int64_t handle : handles) engine->Release(handle);
    }
    gate.Pass();
    Check(engine->Shutdown());
    gate.Pass();  // nobody's memory goes while others still look at it
  };
  std::vector<std::thread> threads;
  for (int thread = 0; thread < threads_in_all; ++thread) threads.emplace_back(body, thread);
  for (std::thread& thread : threads) thread.join();
  return result;
}

}  // namespace sparkvod::bench
