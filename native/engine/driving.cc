// How an engine is driven: who holds the token, what a cycle does, who waits meanwhile.
// docs/threading.md has the rules.
#include <unistd.h>

#include <algorithm>
#include <csignal>

#include "native/engine/engine.h"
#include "native/engine/told.h"

namespace sparkvod {
namespace {

// A caller that can be interrupted looks for signals this often while it sleeps.
constexpr int kInterruptMs = 200;
// After a caller has driven, the background thread looks this often, for this long, before it
// sleeps until it is rung.
constexpr int kPatrolMs = 1;
constexpr int64_t kPatrolForNs = 20000000;
// While a caller drives, the background thread looks this often whether it has left operations that
// are still pending, of which somebody must see that they do not wait for ever.
constexpr int kRelieveMs = 500;

}  // namespace

bool Engine::TakeToken() {
  if (driving_) return false;
  driving_ = true;
  StayAwake();
  return true;
}

void Engine::StayAwake() {
  std::atomic<uint32_t>& sleeper = world_->arena->header().sleeper;
  if (sleeper.load(std::memory_order_relaxed) != kAwake) sleeper.store(kAwake);
}

void Engine::LeaveToBackground() {
  if (!stopped_.load()) {
    if (HasOwnWork() || negotiator_->pending() || negotiator_->attends()) {
      world_->arena->header().sleeper.store(kIdle);
      // What came in since the driver's last look, or while TCP sockets were silent for the
      // background thread, is its; as is to see to it that nothing waits for ever.
      if (HasWork() || world_->idle.any_fired() || (sleeps_on_ && stall_->DueMs() >= 0)) {
        sleeps_on_ = false;
        world_->idle.Ring();
      }
    } else {
      // Nothing of this rank waits, so joining a peer's cycle now would not bring anybody on: no
      // collective ends without what this rank has yet to submit. The caller is likely to be back
      // first; if not, the patrol joins.
      StayAwake();
      patrol_until_ns_ = finished_ns_ + kPatrolForNs;
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
  {
    std::lock_guard<std::mutex> lock(mu_);
    fresh_.swap(queue_);
    queued_.store(0);
    rung_ = false;
  }
  const bool ending = want_shutdown_.load();
  shutdown_said_ = shutdown_said_ || ending;
  const int64_t began_ns = timeline_.on() ? NowNs() : 0;
  if (began_ns != 0)
    for (const auto& operation : fresh_) operation->taken_ns = began_ns;
  Negotiator::Outcome outcome;
  again_ = false;
  if (Result r = negotiator_->Cycle(&fresh_, ending ? farewell_ : "", &outcome); !r.ok())
    return Break(outcome.agreed, r);
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
    if (Result r = executor_->Execute(outcome.agreed, std::move(outcome.offers)); !r.ok())
      return Break(outcome.agreed, r);
  }
  if (!outcome.shut_down.empty())
    Stop(Result::Fail(Code::kShutDown, ending ? "the engine was shut down" : outcome.shut_down),
         true);
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
  const bool executed = result.ok() && operation->ended_ns != 0;
  const int64_t now_ns = finished_ns_ = executed ? operation->ended_ns : NowNs();
  if (timeline_.on()) timeline_.Add(LifeOf(*operation, now_ns));
  {
    std::lock_guard<std::mutex> lock(mu_);
    in_flight_.erase(operation->key);
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

void Engine::Break(const std::vector<Agreed>& agreed, const Result& cause) {
  for (const Agreed& a : agreed)
    if (a.operation != nullptr && !a.operation->done.load()) Finish(a.operation, cause);
  Stop(cause, false);
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

void Engine::DriveUntil(const Condition& until, const Deadline& deadline,
                        const Interrupted& interrupted) {
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

void Engine::WaitUntil(const Condition& until, const Deadline& deadline,
                       const Interrupted& interrupted) {
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
    comm_->SetPatient(false);
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
  uint32_t departures_seen = 0;
  std::unique_lock<std::mutex> lock(mu_);
  while (state_ == State::kRunning) {
    if (!driving_ && HasWork()) {
      DriveInBackground(&lock);
      continue;
    }
    int timeout = -1;
    if (patrolling_ && NowNs() < patrol_until_ns_ &&
        (driving_ || !(negotiator_->pending() || negotiator_->attends()))) {
      timeout = kPatrolMs;
    } else {
      patrolling_ = false;
      if (driving_) {
        timeout = kRelieveMs;
      } else {
        // Announce, look once more, sleep: what comes after the announcement rings.
        world_->arena->header().sleeper.store(kIdle);
        if (HasWork()) continue;
        world_->idle.Rearm();
        timeout = stall_->DueMs();
      }
    }
    sleeps_on_ = timeout < 0;
    lock.unlock();
    const bool news = world_->idle.Sleep(timeout);
    lock.lock();
    rung_ = sleeps_on_ = false;
    ++stats_.idle_wakes;
    if (state_ != State::kRunning || driving_) continue;
    // Whoever leaves rings but once.
    const uint32_t departures = world_->arena->header().departures.load();
    if (patrolling_ && !news && departures == departures_seen && !HasWork()) continue;
    departures_seen = departures;
    DriveInBackground(&lock, [this, news] {
      if (Result departed = comm_->CheckPeers(news); !departed.ok() && !HasWork())
        Stop(departed, false);
      CheckStall();
    });
  }
}

// The application computes meanwhile: a thread that spins beside it would take its cores. Where
// completions are called, they are what the application waits for, as far as is known.
void Engine::DriveInBackground(std::unique_lock<std::mutex>* lock,
                               const std::function<void()>& first) {
  TakeToken();
  comm_->SetPatient(waiters_ == 0 && !calls_back_);
  lock->unlock();
  if (first) first();
  while (HasWork()) {
    Linger();
    RunCycle();
  }
  comm_->SetPatient(false);
  lock->lock();
  ReleaseToken();
}

}  // namespace sparkvod
