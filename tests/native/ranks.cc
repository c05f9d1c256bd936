#include "tests/native/ranks.h"

#include <dirent.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <thread>

#include "native/transport/tls/session.h"
#include "tests/native/check.h"

namespace sparkvod::check {
namespace {

using Clock = std::chrono::steady_clock;

Clock::time_point After(double seconds) {
  return Clock::now() + std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

void Nap() { std::this_thread::sleep_for(std::chrono::microseconds(200)); }

int CountEntries(const char* folder) {
  DIR* dir = ::opendir(folder);
  if (dir == nullptr) return -1;
  int count = 0;
  while (::readdir(dir) != nullptr) ++count;
  ::closedir(dir);
  return count - 2;  // . and ..
}

}  // namespace

Board::Board(int size) : size_(size) {
  void* memory =
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || size > kMaxRanks) std::abort();
  shared_ = new (memory) Shared{};
}

Board::~Board() { ::munmap(shared_, sizeof(Shared)); }

std::vector<std::string> Board::Gather(int rank, const std::string& bytes) {
  Slot& own = shared_->slots[rank];
  const uint32_t round = own.round.load() + 1;
  if (bytes.size() > kMaxBytes) std::abort();
  // A slot is written again only when all have read its last round.
  for (int r = 0; r < size_; ++r)
    while (shared_->read[r].load() + 1 < round) Nap();
  own.length = static_cast<uint32_t>(bytes.size());
  std::memcpy(own.bytes, bytes.data(), bytes.size());
  own.round.store(round);
  std::vector<std::string> all;
  for (int r = 0; r < size_; ++r) {
    Slot& slot = shared_->slots[r];
    while (slot.round.load() < round) Nap();
    all.emplace_back(slot.bytes, slot.length);
  }
  shared_->read[rank].store(round);
  return all;
}

bool CanFork() {
#if defined(__SANITIZE_THREAD__)
  return false;
#else
  return true;
#endif
}

bool CanEncrypt() {
#if defined(__SANITIZE_THREAD__)
  return false;
#endif
  const Result prepared = TlsSession::Prepare();
  static const bool kSaid = [&] {
    if (!prepared.ok()) std::cout << "without TLS: " << prepared.Report() << std::endl;
    return true;
  }();
  return kSaid && prepared.ok();
}

int OpenFiles() { return CountEntries("/proc/self/fd"); }

bool MayOpenFiles(int files) {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const auto need = static_cast<rlim_t>(files);
  if (limit.rlim_cur >= need) return true;
  if (limit.rlim_max < need) return false;
  limit.rlim_cur = need;
  return ::setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

Holdings::Holdings() : files_(OpenFiles()), threads_(1) {
  // Between tests there is the runner's thread and, under a sanitizer, that one's own.
  for (int look = 0; look < 50; ++look) {
    threads_ = CountEntries("/proc/self/task");
    if (threads_ == 1) return;
    Nap();
  }
}

void Holdings::ExpectUnchanged(const char* file, int line) const {
  int files = 0, threads = 0;
  const auto deadline = After(2);
  do {
    files = OpenFiles();
    threads = CountEntries("/proc/self/task");
    if (files == files_ && threads == threads_) return;
    Nap();
  } while (Clock::now() < deadline);
  ExpectEqual(file, line, "open files", files, files_);
  ExpectEqual(file, line, "threads", threads, threads_);
}

void RunThreads(int size, const Body& body, double seconds) {
  Board board(size);
  std::mutex mu;
  std::condition_variable ended;
  int running = size;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      body(rank, board);
      const std::lock_guard<std::mutex> lock(mu);
      --running;
      ended.notify_all();
    });
  }
  {
    std::unique_lock<std::mutex> lock(mu);
    if (!ended.wait_until(lock, After(seconds), [&] { return running == 0; })) {
      std::cerr << running << " of " << size << " ranks did not end within " << seconds << " s"
                << std::endl;
      std::abort();
    }
  }
  for (std::thread& thread : threads) thread.join();
}

std::vector<int> RunProcesses(int size, const Body& body, const std::vector<int>& killed,
                              double seconds) {
  Board board(size);
  std::vector<pid_t> pids;
  std::cout.flush();
  for (int rank = 0; rank < size; ++rank) {
    const pid_t pid = ::fork();
    if (pid < 0) std::abort();
    if (pid == 0) {
      State::Get().failures = 0;
      body(rank, board);
      ::_exit(State::Get().failures == 0 ? 0 : 1);
    }
    pids.push_back(pid);
  }
  std::vector<int> statuses(pids.size(), -1);
  const auto deadline = After(seconds);
  size_t left = pids.size();
  bool late = false;
  while (left > 0) {
    for (size_t i = 0; i < pids.size(); ++i) {
      if (pids[i] > 0 && ::waitpid(pids[i], &statuses[i], WNOHANG) == pids[i]) {
        pids[i] = -1;
        --left;
      }
    }
    if (!late && Clock::now() > deadline) {
      late = true;
      for (size_t i = 0; i < pids.size(); ++i) {
        if (pids[i] <= 0) continue;
        Fail(__FILE__, __LINE__,
             "the process of rank " + std::to_string(i) + " did not end in time");
        ::kill(pids[i], SIGKILL);
      }
    }
    if (left > 0) Nap();
  }
  for (size_t i = 0; i < statuses.size(); ++i) {
    const bool dies = std::find(killed.begin(), killed.end(), static_cast<int>(i)) != killed.end();
    const int status = statuses[i];
    if (dies ? !WIFSIGNALED(status) : !(WIFEXITED(status) && WEXITSTATUS(status) == 0))
      Fail(__FILE__, __LINE__,
           "the process of rank " + std::to_string(i) + " ended with status " +
               std::to_string(status));
  }
  return statuses;
}

}  // namespace sparkvod::check
