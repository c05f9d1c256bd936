#include "benchmarks/native/ranks.h"

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "native/base/clock.h"

namespace sparkvod::bench {
namespace {

// The cores that this process may use.
std::vector<int> Cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return {0};
  std::vector<int> cores;
  for (int c = 0; c < CPU_SETSIZE; ++c)
    if (CPU_ISSET(c, &set)) cores.push_back(c);
  return cores;
}

char* Map(size_t bytes, int kind) {
  void* at = ::mmap(nullptr, std::max<size_t>(bytes, 1), PROT_READ | PROT_WRITE,
                    kind | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) Fail("cannot map " + std::to_string(bytes) + " bytes");
  return static_cast<char*>(at);
}

}  // namespace

void Fail(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::_Exit(1);
}

char* SharedMemory(size_t bytes) { return Map(bytes, MAP_SHARED); }
char* PrivateMemory(size_t bytes) { return Map(bytes, MAP_PRIVATE); }

void Expect(const float* data, size_t count, float expected, const std::string& what) {
  for (size_t i = 0; i < count; ++i)
    if (data[i] != expected)
      Fail(what + ": element " + std::to_string(i) + " is " + std::to_string(data[i]) + ", " +
           std::to_string(expected) + " was expected");
}

Ranks::Ranks(int size, int calls) : size_(size), calls_(calls) {
  crowded_ = static_cast<size_t>(size) > Cores().size();
  const auto ranks = static_cast<size_t>(size);
  arrivals_ = new (SharedMemory(ranks * sizeof(Arrivals))) Arrivals[ranks];
  told_ = new (SharedMemory(ranks * sizeof(Told))) Told[ranks];
  times_ = reinterpret_cast<int64_t*>(
      SharedMemory(2 * ranks * static_cast<size_t>(calls) * sizeof(int64_t)));
  back_to_back_ = new (SharedMemory(sizeof(uint32_t))) std::atomic<uint32_t>(0);
}

std::vector<double> Ranks::Run(bool pinned, const std::function<void(int rank)>& body) {
  const std::vector<int> cores = Cores();
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    const pid_t pid = ::fork();
    if (pid < 0) Fail("cannot fork a rank");
    if (pid == 0) {
      if (pinned && !crowded_) {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cores[static_cast<size_t>(rank)], &one);
        ::sched_setaffinity(0, sizeof one, &one);
      }
      body(rank);
      std::_Exit(0);
    }
    ranks.push_back(pid);
  }
  bool good = true;
  for (size_t left = ranks.size(); left > 0; --left) {
    int status = 0;
    ::wait(&status);
    if (good && status != 0)  // the others would wait for it
      for (const pid_t pid : ranks) ::kill(pid, SIGKILL);
    good = good && status == 0;
  }
  if (!good) Fail("a rank failed");
  std::vector<double> seconds;
  for (int c = 0; c < calls_; ++c) {
    int64_t began = INT64_MIN, ended = INT64_MIN, longest = 0;
    for (int r = 0; r < size_; ++r) {
      began = std::max(began, Began(r)[c]);
      ended = std::max(ended, Ended(r)[c]);
      longest = std::max(longest, Ended(r)[c] - Began(r)[c]);
    }
    seconds.push_back(1e-9 *
                      static_cast<double>(back_to_back_->load() != 0 ? longest : ended - began));
  }
  return seconds;
}

void Ranks::Barrier(int rank) {
  const uint32_t now = ++barriers_;
  arrivals_[rank].count.store(now);
  for (int r = 0; r < size_; ++r)
    for (int spins = crowded_ ? kSpins : 0;
         static_cast<int32_t>(arrivals_[r].count.load(std::memory_order_acquire) - now) < 0;
         ++spins) {
      // Ranks that are not pinned may have met on one core.
      if (spins >= kSpins) ::sched_yield();
      CpuRelax();
    }
}

void Ranks::Measure(int rank, const std::function<void()>& prepare,
                    const std::function<void()>& call) {
  for (int c = -kWarmUp; c < calls_; ++c) {
    prepare();
    Barrier(rank);
    const int64_t began = NowNs();
    call();
    const int64_t ended = NowNs();
    if (c >= 0) {
      Began(rank)[c] = began;
      Ended(rank)[c] = ended;
    }
  }
  Barrier(rank);
}

void Ranks::MeasureLatency(int rank, const std::function<void()>& call) {
  back_to_back_->store(1);
  for (int c = 0; c < kWarmUp; ++c) call();
  Barrier(rank);
  for (int c = 0; c < calls_; ++c) {
    Began(rank)[c] = NowNs();
    call();
    Ended(rank)[c] = NowNs();
  }
  Barrier(rank);
}

std::vector<std::string> Ranks::Gather(int rank, const std::string& bytes) {
  if (bytes.size() > kGatherBytes) Fail("too much to gather");
  std::memcpy(told_[rank].bytes, bytes.data(), bytes.size());
  told_[rank].length = bytes.size();
  Barrier(rank);
  std::vector<std::string> all;
  for (int r = 0; r < size_; ++r) all.emplace_back(told_[r].bytes, told_[r].length);
  return all;
}

}  // namespace sparkvod::bench
