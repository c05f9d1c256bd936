// One rank's engine: what front ends submit to and wait on. docs/threading.md says which thread
// does what.
//
// An object without globals: N engines in N threads of one process are a world of N ranks.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "native/base/config.h"
#include "native/base/timeline.h"
#include "native/bootstrap/bootstrap.h"
#include "native/engine/executor.h"
#include "native/engine/negotiator.h"
#include "native/engine/operation.h"
#include "native/engine/stall.h"
#include "native/engine/stats.h"

namespace sparkvod {

// Asked now and then by calls that block; true ends them (a signal has come in).
using Interrupted = std::function<bool()>;

class Engine {
 public:
  static Result Create(const Config& config, std::unique_ptr<Engine>* out);
  ~Engine();  // leaves like Abort when the engine still runs
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Opens the listeners; `endpoint` is for the other ranks.
  Result Listen(std::string* endpoint);
  // Joins the world whose endpoints, by rank, these are. Another thread's Abort or Shutdown ends
  // it.
  Result Connect(int rank, const std::vector<std::string>& endpoints, const std::string& secret,
                 const Interrupted& interrupted = {});
  const Topology& topology() const { return topology_; }

  Result Allocate(size_t bytes, std::shared_ptr<Memory>* out);

  // Queues a collective. `request.entries` give dtypes and shapes, `parts` the memory of each.
  // `wake`: let the background thread begin; without it the caller is about to Wait. Names must not
  // be in flight twice.
  Result Submit(Request request, std::vector<Part> parts, bool wake, int64_t* handle);
  // The same for callers that do not wait: `completed` is called when the collective has ended,
  // unless an error is returned. There is no handle.
  Result Submit(Request request, std::vector<Part> parts, Completed completed);
  Result Poll(int64_t handle, bool* done);
  // Waits until the collective is done and returns how it ended, kTimeout when `seconds` (< 0: for
  // ever) pass before.
  Result Wait(int64_t handle, double seconds = -1, const Interrupted& interrupted = {});
  // The operation, for its output.
  Result Find(int64_t handle, std::shared_ptr<Operation>* out);
  void Release(int64_t handle);

  // Leaves the world at once: every peer's collectives fail and say `reason`. Before the world is
  // there, Connect fails with it; it may still run for a moment when this returns.
  void Abort(const std::string& reason);
  // Ends the world in agreement: what is pending on any rank fails with kShutDown, on other ranks
  // with this one's name and `why`. Idempotent.
  Result Shutdown(const Interrupted& interrupted = {}, const std::string& why = {});
  // Whether it has, whatever came after.
  bool connected() const { return connected_.load(); }
  // Whether collectives can be submitted: it has connected, and neither failed nor was shut down.
  bool running() const { return connected_.load() && !stopped_.load(); }
  Stats GetStats();
  // What carries collectives out, once connected: its thread-safe part, and the meter.
  Executor& executor() { return *executor_; }

  // The signal that this process sends itself when the others wait for this rank; 0: none. Its
  // handler shows what the process is doing.
  void SetStackSignal(int signal) { stack_signal_.store(signal); }

  // Writes what this rank does to a file in Chrome's trace format, until StopTimeline or the
  // engine's end. Thread-safe.
  Result StartTimeline(const std::string& path, bool mark_cycles);
  void StopTimeline() { timeline_.Stop(); }
  // For what the application tells about itself, and for the counts of slices.
  Timeline& timeline() { return timeline_; }

 private:
  using Condition = std::function<bool()>;
  enum class State { kNew, kListening, kConnecting, kRunning, kStopped };

  explicit Engine(const Config& config) : config_(config) {}

  Result MembersOf(const Request& request, std::shared_ptr<const Members>* out);

  // What Connect does without the lock.
  Result Join(int rank, const std::vector<std::string>& endpoints, const std::string& secret,
              const Interrupted& interrupted);
  // Checks a request and makes an operation of it.
  Result Prepare(Request request, std::vector<Part> parts, std::shared_ptr<Operation>* out);
  // With mu_ held: queues it, and sees to it that it is noticed.
  Result Enqueue(const std::shared_ptr<Operation>& operation, bool wake);

  // With the driver token:
  bool HasOwnWork() const;  // this rank has something to say
  bool HasWork();           // or a peer has begun a cycle
  void RunCycle();
  void Finish(const std::shared_ptr<Operation>& operation, const Result& result);
  // Tells the timeline about a cycle that began at `began_ns`.
  void TellCycle(int64_t began_ns, const std::vector<Agreed>& agreed);
  // Ends the engine in the middle of a cycle: with what was agreed on in it, and is not done.
  void Break(const std::vector<Agreed>& agreed, const Result& cause);
  // Ends the engine: tells the peers, fails everything pending.
  void Stop(const Result& cause, bool orderly);
  // Fails the engine when an operation has waited too long for other ranks; warns before.
  void CheckStall();
  // Waits for more submissions, if that is asked for and nothing speaks against it.
  void Linger();
  // The others wait for this rank.
  void BeLate(const Logger& log, const std::string& awaited) const;
  void DriveUntil(const Condition& until, const Deadline& deadline, const Interrupted& interrupted);

  // With mu_ held:
  bool TakeToken();
  // Peers look at it at each step, so it is not written, and fetched anew by them, when it is so.
  void StayAwake();
  void ReleaseToken();
  // A caller stops driving: sees to it that the background thread notices what comes.
  void LeaveToBackground();

  void Background();
  // With mu_ held, without which it drives: `first`, then the cycles that are due.
  void DriveInBackground(std::unique_lock<std::mutex>* lock,
                         const std::function<void()>& first = {});
  // Drives, or waits for who drives, until `until`, the deadline, an interrupt, or the end of the
  // engine.
  void WaitUntil(const Condition& until, const Deadline& deadline, const Interrupted& interrupted);

  Config config_;
  std::unique_ptr<Bootstrap> bootstrap_;
  Topology topology_;
  std::unique_ptr<World> world_;
  std::unique_ptr<Communicator> comm_;
  std::unique_ptr<Negotiator> negotiator_;
  std::unique_ptr<StallInspector> stall_;
  std::unique_ptr<Executor> executor_;
  std::shared_ptr<const Members> everybody_;
  Timeline timeline_;
  std::thread background_;

  std::mutex mu_;
  std::condition_variable cv_;  // a handle completed, the token became free, the engine stopped
  State state_ = State::kNew;
  bool driving_ = false;  // somebody holds the driver token
  bool rung_ = false;     // the background thread was rung and has not looked yet
  bool patrolling_ =
      false;  // the background thread looks by itself now and then, nobody need ring it
  int64_t patrol_until_ns_ = 0;  // and does so until then
  bool sleeps_on_ = false;       // it sleeps until it is rung: nothing was pending
  int waiters_ = 0;
  bool calls_back_ = false;  // some operations were submitted with a completion
  int64_t next_handle_ = 1;
  std::unordered_map<int64_t, std::shared_ptr<Operation>> handles_;
  std::unordered_set<std::string> in_flight_;                         // keys
  std::unordered_map<int32_t, std::shared_ptr<const Members>> sets_;  // but for the world
  std::vector<std::shared_ptr<Operation>> queue_;
  Result cause_;  // why the engine stopped
  std::string abort_reason_;
  Stats stats_;
  std::array<Stats::Latency, kCollectiveCount> latencies_{};

  std::atomic<int> stack_signal_{0};
  std::atomic<size_t> queued_{0};
  std::atomic<bool> connected_{false};
  std::atomic<bool> stopped_{false};
  std::atomic<bool> aborted_{false};
  std::atomic<bool> want_shutdown_{false};
  std::string farewell_ = "it shut down";  // written before want_shutdown_, read after it
  // The driver's own:
  bool again_ = false;  // a cycle is due although nothing new was submitted
  bool shutdown_said_ = false;
  const Interrupted* interrupted_ = nullptr;       // of the caller that drives
  std::vector<std::shared_ptr<Operation>> fresh_;  // empty between cycles
  int64_t finished_ns_ = 0;                        // when an operation last ended
};

}  // namespace sparkvod
