// Runs the registered tests: sparkvod_tests [--full] [--list] [--seed=NUMBER] [substring of the
// names to run].
#include <sys/resource.h>

#include <chrono>
#include <cstring>
#include <iostream>
#include <optional>
#include <random>
#include <string>
#include <thread>

#include "tests/native/check.h"

#if defined(__SANITIZE_ADDRESS__)
// What was freed is kept for a while, and inherited by each rank that is a process: 64 of them had
// no room with the 256 MiB that ASan keeps by itself.
extern "C" const char* __asan_default_options() { return "quarantine_size_mb=16"; }
#endif

namespace {

// Processor time of this process and of the ranks that were processes: what a case costs however
// busy the machine is.
int64_t ProcessorMs() {
  int64_t ms = 0;
  for (const int who : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
    rusage used{};
    ::getrusage(who, &used);
    for (const timeval& time : {used.ru_utime, used.ru_stime})
      ms += int64_t{time.tv_sec} * 1000 + time.tv_usec / 1000;
  }
  return ms;
}

}  // namespace

int main(int argc, char** argv) {
  using Clock = std::chrono::steady_clock;
  auto& state = sparkvod::check::State::Get();
  std::optional<uint64_t> seed;
  std::string filter;
  bool list = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--full") == 0) {
      state.full = true;
    } else if (std::strcmp(argv[i], "--list") == 0) {
      list = true;
    } else if (std::strncmp(argv[i], "--seed=", 7) == 0) {
      seed = std::stoull(argv[i] + 7);
    } else {
      filter = argv[i];
    }
  }
  // A run that fails fails again, unless everything is asked for.
  state.seed = seed.value_or(state.full ? std::random_device()() : 1);
#if defined(__SANITIZE_THREAD__)
  // TSan begins a thread of its own with the program's first; no test is to find it new.
  std::thread([] {}).join();
#endif
  int passed = 0, failed = 0;
  for (const auto& test : state.cases) {
    if (std::string(test.name).find(filter) == std::string::npos) continue;
#if defined(__SANITIZE_THREAD__)
    // Of one thread: they are for the other builds.
    if (!state.full && filter.empty() && std::string(test.name).rfind("Kernels", 0) == 0) continue;
#endif
    if (list) {
      std::cout << test.name << "\n";
      continue;
    }
    state.failures = 0;
    const auto start = Clock::now();
    const int64_t used = ProcessorMs();
    test.body();
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
    const bool good = state.failures == 0;
    ++(good ? passed : failed);
    std::cout << (good ? "ok    " : "FAILED ") << test.name << " (" << ms.count() << " ms, "
              << ProcessorMs() - used << " ms of processors)" << std::endl;
  }
  if (list) return 0;
  std::cout << passed << " passed, " << failed << " failed" << std::endl;
  return failed == 0 && passed > 0 ? 0 : 1;
}
