#include "native/engine/engine.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>

#include "native/engine/admission.h"
#include "native/engine/told.h"

namespace sparkvod {
namespace {

// A caller that can be interrupted looks for signals this often while it sleeps.
constexpr int kInterruptMs = 200;
// An agreed end must not wait for a rank that is stopped or gone.
constexpr double kShutdownSeconds = 5;
// After a caller has driven, the background thread looks this often, for this long, before it
// sleeps until it is rung.
constexpr int kPatrolMs = 1;
constexpr int64_t kPatrolForNs = 20000000;

}  // namespace

Result Engine::Create(const Config& config, std::unique_ptr<Engine>* out) {
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
  } else if (aborted_.load() || bootstrap_ == nullptr) {
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
      std::make_unique<Negotiator>(comm_.get(), static_cast<size_t>(config_.cache_capacity));
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
  std::lock_guard<std::mutex> lock(mu_);
  sets_[0] = std::make_shared<const Members>(std::move(world));
  return {};
}

Result Engine::Allocate(size_t bytes, std::shared_ptr<Memory>* out) {
  std::lock_guard<std::mutex> lock(mu_);
  if (world_ == nullptr)
    return Result::Fail(Code::kInvalid, "allocate() needs an engine that has connected");
  char* data = nullptr;
  SPARKVOD_TRY(world_->arena->heap()->Allocate(bytes, &data));
  *out = std::make_shared<Memory>(world_->arena->heap(), data, bytes);
  return {};
}

Result Engine::MembersOf(const Request& request, std::shared_ptr<const Members>* out) {
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
  auto operation = std::make_shared<Operation>();
  operation->request = std::move(request);
  operation->parts = std::move(parts);
  operation->submitted_ns = NowNs();
  *out = std::move(operation);
  return {};
}

Result Engine::Enqueue(const std::shared_ptr<Operation>& operation, bool wake) {
  if (state_ == State::kStopped) return cause_;
  if (!in_flight_.insert(operation->request.key()).second)
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

Result Engine::Shutdown(const Interrupted& interrupted) {
  {
    std::unique_lock<std::mutex> lock(mu_);
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
  if (executor_ != nullptr) stats.collectives = executor_->Counts();
  return stats;
}

bool Engine::TakeToken() {
  if (driving_) return false;
  driving_ = true;
  world_->arena->header().sleeper.store(kAwake);
  return true;
}

void Engine::LeaveToBackground() {
  if (!stopped_.load()) {
    std::atomic<uint32_t>& sleeper = world_->arena->header().sleeper;
    if (HasOwnWork() || negotiator_->pending() || negotiator_->attends()) {
      sleeper.store(kIdle);
      // What came in since the driver's last look, or while TCP sockets were silent for the
      // background thread, is its.
      if (HasWork() || world_->idle.any_fired()) world_->idle.Ring();
    } else {
      // Nothing of this rank waits, so joining a peer's cycle now would not bring anybody on: no
      // collective ends without what this rank has yet to submit. The caller is likely to be back
      // first; if not, the patrol joins.
      sleeper.store(kAwake);
      patrol_until_ns_ = NowNs() + kPatrolForNs;
      if (!patrolling_) {
        patrolling_ = true;
        world_->idle.Ring();
      }
    }
  }
  ReleaseToken();
}

void Engine::ReleaseToken() {
  driving_ = false;
  if (waiters_ > 0) cv_.notify_all();
}

bool Engine::HasOwnWork() const {
  return queued_.load() > 0 || again_ || aborted_.load() ||
         (want_shutdown_.load() && !shutdown_said_);
}

bool Engine::HasWork() {
  if (stopped_.load()) return false;
  if (HasOwnWork()) return true;
  bool began = false;
  // A broken channel is work too: the cycle will meet the error and end the engine.
  return !negotiator_->PeerBegan(&began).ok() || began;
}

void Engine::RunCycle() {
  if (aborted_.load()) return Stop(Result::Fail(Code::kPeerLost, abort_reason_), false);
  std::vector<std::shared_ptr<Operation>> fresh;
  {
    std::lock_guard<std::mutex> lock(mu_);
    fresh.swap(queue_);
    queued_.store(0);
    rung_ = false;
  }
  const bool ending = want_shutdown_.load();
  shutdown_said_ = shutdown_said_ || ending;
  const int64_t began_ns = timeline_.on() ? NowNs() : 0;
  if (began_ns != 0)
    for (const auto& operation : fresh) operation->taken_ns = began_ns;
  Negotiator::Outcome outcome;
  again_ = false;
  if (Result r = negotiator_->Cycle(std::move(fresh), ending, &outcome); !r.ok())
    return Stop(r, false);
  again_ = outcome.again;
  stall_->AfterCycle(outcome.stalled, &again_);
  if (began_ns != 0) TellCycle(began_ns, outcome.agreed);
  {
    std::lock_guard<std::mutex> lock(mu_);
    stats_.cycles = negotiator_->cycles();
    stats_.cache_hits = negotiator_->cache_hits();
    stats_.cache_misses = negotiator_->cache_misses();
    stats_.sleeps = comm_->sleeps();
  }
  if (!outcome.agreed.empty()) {
    if (Result r = executor_->Execute(outcome.agreed); !r.ok()) {
      for (const Agreed& agreed : outcome.agreed)
        if (agreed.operation != nullptr && !agreed.operation->done.load())
          Finish(agreed.operation, r);
      return Stop(r, false);
    }
  }
  if (outcome.shut_down)
    Stop(Result::Fail(Code::kShutDown,
                      ending ? "the engine was shut down" : "another rank shut the world down"),
         true);
}

Result Engine::StartTimeline(const std::string& path, bool mark_cycles) {
  if (!running())
    return Result::Fail(Code::kInvalid, "a timeline needs an engine that has connected and runs");
  const auto me = static_cast<size_t>(topology_.rank);
  return timeline_.Start(path, {topology_.rank, topology_.size, topology_.hosts[me]}, mark_cycles);
}

void Engine::TellCycle(int64_t began_ns, const std::vector<Agreed>& agreed) {
  const int64_t ended_ns = NowNs();
  for (const Agreed& a : agreed)
    if (a.operation != nullptr) a.operation->agreed_ns = ended_ns;
  if (!agreed.empty() || timeline_.mark_cycles())
    timeline_.Add({Lane::kEngine,
                   {},
                   "negotiate",
                   began_ns,
                   ended_ns,
                   -1,
                   "cycle " + std::to_string(negotiator_->cycles()) + ", agreed on " +
                       std::to_string(agreed.size())});
}

void Engine::Finish(const std::shared_ptr<Operation>& operation, const Result& result) {
  operation->result = result;
  const int64_t now_ns = NowNs();
  if (timeline_.on()) timeline_.Add(LifeOf(*operation, now_ns));
  {
    std::lock_guard<std::mutex> lock(mu_);
    in_flight_.erase(operation->request.key());
    Stats::Latency& latency = latencies_[static_cast<size_t>(operation->request.collective)];
    ++latency.count;
    latency.ns += now_ns - operation->submitted_ns;
    latency.by_microseconds.Add(static_cast<uint64_t>(now_ns - operation->submitted_ns) / 1000);
    const Collective collective = operation->request.collective;
    if (result.ok() && collective == Collective::kAddSet)
      sets_[operation->set->id] = operation->set;
    if (result.ok() && collective == Collective::kRemoveSet) sets_.erase(operation->request.root);
    operation->done.store(true);
    if (waiters_ > 0) cv_.notify_all();
  }
  if (operation->completed) operation->completed(*operation);
}

void Engine::Stop(const Result& cause, bool orderly) {
  if (stopped_.load()) return;
  Departure how;
  how.orderly = orderly;
  how.relayed =
      !aborted_.load() && (cause.code() == Code::kPeerLost || cause.code() == Code::kTimeout);
  how.code = cause.code() == Code::kShutDown ? Code::kPeerLost : cause.code();
  how.cause = cause.Report();
  for (Peer& peer : world_->peers)
    if (peer.link != nullptr) peer.link->Leave(how);
  std::vector<std::shared_ptr<Operation>> pending = negotiator_->TakeAll();
  {
    std::lock_guard<std::mutex> lock(mu_);
    state_ = State::kStopped;
    cause_ = cause;
    pending.insert(pending.end(), queue_.begin(), queue_.end());
    queue_.clear();
    queued_.store(0);
    in_flight_.clear();
    for (const auto& operation : pending) {
      operation->result = cause;
      operation->done.store(true);
    }
    stopped_.store(true);
    world_->idle.Ring();
    cv_.notify_all();
  }
  for (const auto& operation : pending)
    if (operation->completed) operation->completed(*operation);
}

void Engine::CheckStall() {
  if (Result stalled = stall_->Check(&again_); !stalled.ok()) Stop(stalled, false);
}

void Engine::BeLate(const Logger& log, const std::string& awaited) const {
  log.Warning("this rank is late: it has not submitted " + awaited);
  // Who asked for it shows the stacks of this process's threads at this signal.
  if (const int signal = stack_signal_.load(); signal != 0) ::kill(::getpid(), signal);
}

template <typename Until>
void Engine::DriveUntil(Until until, const Deadline& deadline, const Interrupted& interrupted) {
  interrupted_ = &interrupted;
  while (!stopped_.load() && !until() && !deadline.Passed()) {
    if (HasWork()) {
      RunCycle();
      continue;
    }
    int most = deadline.LeftMs(interrupted ? kInterruptMs : -1);
    if (const int stall = stall_->DueMs(); stall >= 0)
      most = most < 0 ? stall : std::min(most, stall);
    Communicator::Step step;
    const Result waited = comm_->Await(
        kForMessage, most,
        [&](Communicator::Step* s) -> Result {
          *s = HasWork() || until() ? Communicator::Step::kDone : Communicator::Step::kStuck;
          return {};
        },
        &step);
    if (!waited.ok())
      Stop(waited, false);
    else
      CheckStall();
  }
  interrupted_ = nullptr;
}

template <typename Until>
void Engine::WaitUntil(Until until, const Deadline& deadline, const Interrupted& interrupted) {
  std::unique_lock<std::mutex> lock(mu_);
  while (!until() && state_ == State::kRunning && !deadline.Passed()) {
    if (TakeToken()) {
      lock.unlock();
      DriveUntil(until, deadline, interrupted);
      lock.lock();
      LeaveToBackground();
      continue;
    }
    ++waiters_;
    const int ms = deadline.LeftMs(interrupted ? kInterruptMs : 1000);
    cv_.wait_for(lock, std::chrono::milliseconds(ms),
                 [&] { return until() || !driving_ || state_ != State::kRunning; });
    --waiters_;
    if (interrupted && !until() && driving_) {
      lock.unlock();
      if (interrupted()) Abort("interrupted by a signal");
      lock.lock();
    }
  }
}

void Engine::Background() {
  const Interrupted never;
  std::unique_lock<std::mutex> lock(mu_);
  while (state_ == State::kRunning) {
    if (!driving_ && HasWork()) {
      TakeToken();
      lock.unlock();
      while (HasWork()) RunCycle();
      lock.lock();
      ReleaseToken();
      continue;
    }
    int timeout = -1;
    if (patrolling_ && NowNs() < patrol_until_ns_ &&
        (driving_ || !(negotiator_->pending() || negotiator_->attends()))) {
      timeout = kPatrolMs;
    } else {
      patrolling_ = false;
      if (!driving_) {
        // Announce, look once more, sleep: what comes after the announcement rings.
        world_->arena->header().sleeper.store(kIdle);
        if (HasWork()) continue;
        world_->idle.Rearm();
        timeout = stall_->DueMs();
      }
    }
    lock.unlock();
    const bool news = world_->idle.Sleep(timeout);
    lock.lock();
    rung_ = false;
    ++stats_.idle_wakes;
    if (state_ != State::kRunning || driving_) continue;
    if (patrolling_ && !news && !HasWork()) continue;
    TakeToken();
    lock.unlock();
    if (Result departed = comm_->CheckPeers(news); !departed.ok() && !HasWork())
      Stop(departed, false);
    CheckStall();
    while (HasWork()) RunCycle();
    lock.lock();
    ReleaseToken();
  }
}

}  // namespace sparkvod
