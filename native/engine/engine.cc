#include "native/engine/engine.h"

#include <algorithm>
#include <cstdio>

#include "native/collectives/cost.h"
#include "native/engine/admission.h"

namespace sparkvod {
namespace {

// An agreed end must not wait for a rank that is stopped or gone.
constexpr double kShutdownSeconds = 5;

}  // namespace

Result Engine::Create(const Config& config, std::unique_ptr<Engine>* out) {
  Wishes wishes;
  SPARKVOD_TRY(WishesOf(config, &wishes));
  out->reset(new Engine(config));
  return {};
}

Engine::~Engine() {
  Abort("its engine was destroyed without shutdown");
  if (background_.joinable()) background_.join();
}

Result Engine::Listen(std::string* endpoint) {
  std::lock_guard<std::mutex> lock(mu_);
  if (state_ != State::kNew)
    return Result::Fail(Code::kInvalid, "listen() was called twice on one engine");
  SPARKVOD_TRY(Bootstrap::Listen(config_, &bootstrap_, endpoint));
  state_ = State::kListening;
  return {};
}

Result Engine::Connect(int rank, const std::vector<std::string>& endpoints,
                       const std::string& secret, const Interrupted& interrupted) {
  std::unique_lock<std::mutex> lock(mu_);
  if (state_ == State::kStopped && aborted_.load()) return cause_;
  if (state_ != State::kListening)
    return Result::Fail(Code::kInvalid,
                        "connect() needs an engine that listens and has not connected yet");
  state_ = State::kConnecting;
  lock.unlock();
  Result joined = Join(rank, endpoints, secret, interrupted);
  lock.lock();
  if (joined.ok()) {
    state_ = State::kRunning;
    connected_.store(true);
    background_ = std::thread([this] { Background(); });
    // An abort that came at the last moment finds a world that must be told.
    if (aborted_.load()) {
      cv_.wait(lock, [this] { return state_ == State::kStopped; });
      joined = cause_;
    }
  } else if (aborted_.load() || bootstrap_ == nullptr || !bootstrap_->listening()) {
    if (aborted_.load())
      joined =
          Result::Fail(want_shutdown_.load() ? Code::kShutDown : Code::kPeerLost, abort_reason_);
    bootstrap_.reset();
    cause_ = joined;
    state_ = State::kStopped;
    stopped_.store(true);
  } else {
    state_ = State::kListening;
  }
  cv_.notify_all();
  return joined;
}

Result Engine::Join(int rank, const std::vector<std::string>& endpoints, const std::string& secret,
                    const Interrupted& interrupted) {
  const auto ended = [&] { return aborted_.load() || (interrupted && interrupted()); };
  SPARKVOD_TRY(bootstrap_->Connect(rank, endpoints, secret, ended, &world_));
  bootstrap_.reset();
  topology_ = world_->topology;
  comm_ = std::make_unique<Communicator>(world_.get(), config_, [this]() -> Result {
    if (aborted_.load()) return Result::Fail(Code::kPeerLost, abort_reason_);
    if (interrupted_ != nullptr && *interrupted_ && (*interrupted_)())
      return Result::Fail(Code::kShutDown, "interrupted by a signal");
    return {};
  });
  comm_->TellTo(&timeline_);
  negotiator_ =
      std::make_unique<Negotiator>(comm_.get(), static_cast<size_t>(config_.cache_capacity),
                                   [this](const Operation& operation, char* room, size_t bytes) {
                                     return executor_->Offer(operation, room, bytes);
                                   });
  const Logger log(config_.log_level, "rank " + std::to_string(rank));
  stall_ = std::make_unique<StallInspector>(
      config_, negotiator_.get(), log,
      [this, log](const std::string& awaited) { BeLate(log, awaited); });
  std::unique_ptr<Backend> backend;
  SPARKVOD_TRY(MakeBackend("builtin", comm_.get(), config_, &backend));
  executor_ =
      std::make_unique<Executor>(world_.get(), comm_.get(), std::move(backend), config_,
                                 [this](const std::shared_ptr<Operation>& operation,
                                        const Result& result) { Finish(operation, result); });
  Members world;
  for (int r = 0; r < topology_.size; ++r) world.ranks.push_back(r);
  world.place = topology_.rank;
  everybody_ = std::make_shared<const Members>(std::move(world));
  return {};
}

Result Engine::Allocate(size_t bytes, std::shared_ptr<Memory>* out) {
  if (!connected_.load())
    return Result::Fail(Code::kInvalid, "allocate() needs an engine that has connected");
  char* data = nullptr;
  SPARKVOD_TRY(world_->arena->heap()->Allocate(bytes, &data));
  *out = std::make_shared<Memory>(world_->arena->heap(), data, bytes);
  return {};
}

Result Engine::MembersOf(const Request& request, std::shared_ptr<const Members>* out) {
  if (request.process_set == 0) {
    *out = everybody_;
    return {};
  }
  std::lock_guard<std::mutex> lock(mu_);
  const auto set = sets_.find(request.process_set);
  if (set == sets_.end())
    return Result::Fail(Code::kInvalid, std::string(NameOf(request.collective)) + " of '" +
                                            request.name + "' was asked for in process set " +
                                            std::to_string(request.process_set) +
                                            ", which was not added, or was removed");
  *out = set->second;
  return {};
}

Result Engine::Submit(Request request, std::vector<Part> parts, bool wake, int64_t* handle) {
  std::shared_ptr<Operation> operation;
  SPARKVOD_TRY(Prepare(std::move(request), std::move(parts), &operation));
  std::lock_guard<std::mutex> lock(mu_);
  SPARKVOD_TRY(Enqueue(operation, wake));
  *handle = next_handle_++;
  handles_.emplace(*handle, std::move(operation));
  return {};
}

Result Engine::Submit(Request request, std::vector<Part> parts, Completed completed) {
  std::shared_ptr<Operation> operation;
  SPARKVOD_TRY(Prepare(std::move(request), std::move(parts), &operation));
  operation->completed = std::move(completed);
  std::lock_guard<std::mutex> lock(mu_);
  calls_back_ = true;
  return Enqueue(operation, true);
}

Result Engine::Prepare(Request request, std::vector<Part> parts, std::shared_ptr<Operation>* out) {
  if (!connected_.load()) {
    std::lock_guard<std::mutex> lock(mu_);
    if (state_ == State::kStopped) return cause_;
    return Result::Fail(Code::kInvalid, "a collective needs an engine that has connected");
  }
  std::shared_ptr<const Members> members;
  SPARKVOD_TRY(MembersOf(request, &members));
  SPARKVOD_TRY(Admit(executor_->backend(), *members, parts, &request));
  if (request.collective == Collective::kTune) SPARKVOD_TRY(executor_->CheckTune(request.splits));
  for (size_t i = 0; i < request.entries.size(); ++i) {
    Entry& e = request.entries[i];
    const size_t bytes = static_cast<size_t>(e.count()) * SizeOf(e.dtype);
    // What peers may read, or write, where it lies.
    const bool read =
        request.collective == Collective::kReducescatter ||
        (request.collective == Collective::kBroadcast && request.root == topology_.rank);
    if (read || (request.collective == Collective::kAllreduce && parts[i].in == parts[i].out))
      e.placement = world_->arena->heap()->OffsetOf(parts[i].in, bytes);
  }
  auto operation = std::make_shared<Operation>(std::move(request));
  operation->parts = std::move(parts);
  operation->submitted_ns = NowNs();
  *out = std::move(operation);
  return {};
}

Result Engine::Enqueue(const std::shared_ptr<Operation>& operation, bool wake) {
  if (state_ == State::kStopped) return cause_;
  if (!in_flight_.insert(operation->key).second)
    return Result::Fail(
        Code::kInvalid,
        "a tensor named '" + operation->request.name +
            "' is in flight already; names must be unique among pending collectives");
  queue_.push_back(operation);
  queued_.store(queue_.size());
  if (driving_) {
    if (world_->arena->header().sleeper.load() == kForMessage) world_->driver.Ring();
  } else if (wake && !rung_) {
    rung_ = true;
    world_->idle.Ring();
  }
  return {};
}

Result Engine::Find(int64_t handle, std::shared_ptr<Operation>* out) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto it = handles_.find(handle);
  if (it == handles_.end())
    return Result::Fail(Code::kInvalid,
                        "handle " + std::to_string(handle) + " is unknown or was released");
  *out = it->second;
  return {};
}

Result Engine::Poll(int64_t handle, bool* done) {
  std::shared_ptr<Operation> operation;
  SPARKVOD_TRY(Find(handle, &operation));
  *done = operation->done.load();
  return {};
}

Result Engine::Wait(int64_t handle, double seconds, const Interrupted& interrupted) {
  std::shared_ptr<Operation> operation;
  SPARKVOD_TRY(Find(handle, &operation));
  WaitUntil([&] { return operation->done.load(); },
            Deadline::After(seconds < 0 ? 0 : std::max(seconds, 1e-9)), interrupted);
  if (operation->done.load()) return operation->result;
  char text[32];
  std::snprintf(text, sizeof text, "%g", seconds);
  return Result::Fail(Code::kTimeout, "'" + operation->request.name + "' was not done within " +
                                          text + " s; it goes on, and may be waited for again");
}

void Engine::Release(int64_t handle) {
  std::shared_ptr<Operation> operation;  // destroyed after the lock is gone
  std::lock_guard<std::mutex> lock(mu_);
  const auto it = handles_.find(handle);
  if (it == handles_.end()) return;
  operation = std::move(it->second);
  handles_.erase(it);
}

void Engine::Abort(const std::string& reason) {
  std::unique_lock<std::mutex> lock(mu_);
  if (state_ == State::kNew || state_ == State::kStopped) return;
  if (!aborted_.load()) {
    abort_reason_ = reason;
    aborted_.store(true);
  }
  if (state_ == State::kConnecting) return;
  if (state_ == State::kListening) {
    bootstrap_.reset();
    cause_ = Result::Fail(Code::kPeerLost, abort_reason_);
    state_ = State::kStopped;
    stopped_.store(true);
    return;
  }
  if (TakeToken()) {
    lock.unlock();
    Stop(Result::Fail(Code::kPeerLost, abort_reason_), false);
    lock.lock();
    ReleaseToken();
    return;
  }
  world_->driver.Ring();
  cv_.wait(lock, [this] { return state_ == State::kStopped; });
}

Result Engine::Shutdown(const Interrupted& interrupted, const std::string& why) {
  {
    std::unique_lock<std::mutex> lock(mu_);
    // Not once it may be read.
    if (!want_shutdown_.load() && !why.empty()) farewell_ = why;
    if (state_ == State::kConnecting) {
      if (!aborted_.load()) {
        want_shutdown_.store(true);
        abort_reason_ = "the engine was shut down while it connected";
        aborted_.store(true);
      }
      cv_.wait_for(lock, std::chrono::duration<double>(kShutdownSeconds),
                   [this] { return state_ != State::kConnecting; });
    }
    if (state_ == State::kNew || state_ == State::kListening) {
      bootstrap_.reset();
      cause_ = Result::Fail(Code::kShutDown, "the engine was shut down");
      state_ = State::kStopped;
      return {};
    }
  }
  want_shutdown_.store(true);
  {
    // Another thread may drive, and sleep.
    const std::lock_guard<std::mutex> lock(mu_);
    if (state_ == State::kRunning && driving_) world_->driver.Ring();
  }
  WaitUntil([this] { return stopped_.load(); }, Deadline::After(kShutdownSeconds), interrupted);
  if (!stopped_.load()) Abort("shut down while other ranks did not answer");
  if (background_.joinable()) background_.join();
  timeline_.Stop();
  return {};
}

Stats Engine::GetStats() {
  Stats stats;
  {
    std::lock_guard<std::mutex> lock(mu_);
    stats = stats_;
    stats.in_flight = in_flight_.size();
    for (size_t c = 0; c < kCollectiveCount; ++c)
      if (latencies_[c].count > 0)
        stats.latencies[NameOf(static_cast<Collective>(c))] = latencies_[c];
  }
  if (connected_.load()) stats.collectives = executor_->Counts();
  return stats;
}

Result Engine::StartTimeline(const std::string& path, bool mark_cycles) {
  if (!running())
    return Result::Fail(Code::kInvalid, "a timeline needs an engine that has connected and runs");
  const auto me = static_cast<size_t>(topology_.rank);
  return timeline_.Start(path, {topology_.rank, topology_.size, topology_.hosts[me]}, mark_cycles);
}

}  // namespace sparkvod
