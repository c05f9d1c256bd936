// One rank's side of blocking exchanges with its peers: what the algorithms are written over.
//
// Its ranks are all of the world, or a set of them, which are then counted from 0 in their order.
//
// Used by the holder of the driver token only. Every wait spins for a while, then sleeps, and ends
// with an error when a peer leaves, when the engine is aborted, or when nothing has moved for the
// collective's deadline.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "native/base/clock.h"
#include "native/base/config.h"
#include "native/base/log.h"
#include "native/base/result.h"
#include "native/base/timeline.h"
#include "native/bootstrap/world.h"
#include "native/collectives/cores.h"

namespace sparkvod {

class Communicator {
 public:
  // `health` is asked after every sleep: an abort of this engine, an interrupt of its user.
  Communicator(World* world, const Config& config, std::function<Result()> health);
  // Of some ranks of the world, in ascending order, this one among them. What they publish to each
  // other passes through a lane of their own, LaneBytes of engine memory, so that overlapping sets
  // do not tread on each other; MoveIn is told where each rank has it.
  Communicator(const Communicator& world, const std::vector<int>& ranks);
  size_t LaneBytes() const;
  // offsets: where each rank's lane lies in its arena, by rank. The lanes are zero.
  void MoveIn(const std::vector<int64_t>& offsets);

  int rank() const { return topology_.rank; }
  int size() const { return topology_.size; }
  // How these ranks are grouped by host; its ranks are this communicator's.
  const Topology& topology() const { return topology_; }
  // "rank 3 on host7": by its number in the world.
  std::string Name(int rank) const { return world_->Name(ranks_[static_cast<size_t>(rank)]); }
  // True when all ranks share memory, so that the direct algorithms apply.
  bool shares_memory() const { return local_size() == size(); }
  // Of a local rank of this host.
  Arena& arena(int local_rank) const { return *arenas_[static_cast<size_t>(local_rank)]; }
  int local_rank() const { return topology_.local_rank; }
  // Through which small collectives pass, and chunks of large ones.
  char* slot(int local_rank, int parity) const {
    return lanes_[static_cast<size_t>(local_rank)].slots +
           Geometry::kSlotBytes * static_cast<size_t>(parity);
  }
  char* staging(int local_rank) const { return lanes_[static_cast<size_t>(local_rank)].staging; }
  size_t staging_bytes() const { return own_arena().geometry().staging_bytes; }
  // Ranks of this host that share memory, this one included; 0 when none do.
  int local_size() const { return static_cast<int>(arenas_.size()); }
  // True when there are several hosts with equally many ranks, several each, that share memory.
  bool hierarchical() const {
    return !shares_memory() && local_size() > 1 && topology_.homogeneous;
  }
  Arena& own_arena() const { return *world_->arena; }
  // "inproc", "shm", "tcp", or "shm+tcp" for a mixture.
  const std::string& transport() const { return transport_; }

  // Words for the errors of what follows: "negotiation".
  void Describe(std::string what) {
    doing_ = std::move(what);
    tensor_ = nullptr;
  }
  // "allreduce of 'layer1.weight' and 3 more". The name must outlive the next description.
  void Describe(const char* collective, const std::string* tensor, size_t others) {
    doing_ = collective;
    tensor_ = tensor;
    others_ = others;
  }
  std::string doing() const;

  Result Send(int to, const void* data, size_t bytes) {
    return SendRecv(to, data, bytes, -1, nullptr, 0);
  }
  Result Recv(int from, void* data, size_t bytes) {
    return SendRecv(-1, nullptr, 0, from, data, bytes);
  }
  // Both at once, so that rings cannot deadlock.
  Result SendRecv(int to, const void* out, size_t out_bytes, int from, void* in, size_t in_bytes);

  Channel& channel(int peer) const {
    return *world_->peers[static_cast<size_t>(ranks_[static_cast<size_t>(peer)])].channel;
  }

  // Direct collectives proceed in phases. Arrive() says that this rank has done its next step;
  // AwaitPhase waits until every rank of this host has arrived as often as this one had when
  // `phase` was returned.
  uint64_t Arrive();
  // What the next Arrive() will return.
  uint64_t NextPhase() const { return phase_ + 1; }
  Result AwaitPhase(uint64_t phase);
  // Waits for one rank of this host only.
  Result AwaitPhaseOf(int local_rank, uint64_t phase);
  // Waits until all have arrived as often as this one: then nobody reads any more what this rank
  // published in collectives that it has left without waiting for the others.
  Result Settle() { return AwaitPhase(phase_); }

  // What an attempt says.
  enum class Step { kDone, kMoved, kStuck };
  // One try to send, or receive, what is left of the `bytes` of `data`, of which `*moved` have gone
  // before; when any more go, the step is kMoved. An error names the peer.
  Result TrySend(int to, const void* data, size_t bytes, size_t* moved, Step* step);
  Result TryRecv(int from, void* data, size_t bytes, size_t* moved, Step* step);
  // One try of `attempt`; while it is stuck, tries for the spinning time, then once more after a
  // sleep of at most `most_ms` (-1: for ever) that ends at news of kind `state`.
  template <typename Attempt>
  Result Await(Sleeper state, int most_ms, Attempt attempt, Step* step) {
    if (!crowded_) cores_.Tell();
    SPARKVOD_TRY(attempt(step));
    if (*step != Step::kStuck) return {};
    if (spin_ns_ > 0 && !patient_.load(std::memory_order_relaxed)) {
      // A peer that is as far as this rank answers before a clock has been read a few times.
      for (int looks = 0; !crowded_ && looks < kFirstLooks; ++looks) {
        CpuRelax();
        SPARKVOD_TRY(attempt(step));
        if (*step != Step::kStuck) return {};
      }
      const int64_t began = NowNs();
      for (int64_t now = began; now - began < spin_ns_; now = NowNs()) {
        const int64_t waited = now - began;
        if (crowded_ || waited >= kAloneNs || (waited >= kPartNs && !cores_.Part()))
          std::this_thread::yield();
        else
          for (int i = 0; i < kSpinsPerLook; ++i) CpuRelax();
        SPARKVOD_TRY(attempt(step));
        if (*step != Step::kStuck) return {};
      }
    }
    // The last look after announcing the sleep: what came before it is seen, what comes after it
    // rings.
    std::atomic<uint32_t>& sleeper = world_->arena->header().sleeper;
    sleeper.store(state);
    const Result last_look = attempt(step);
    bool news = lost_;
    if (!news && last_look.ok() && *step == Step::kStuck) {
      news = world_->driver.Sleep(most_ms);
      ++sleeps_;
    }
    sleeper.store(kAwake);
    SPARKVOD_TRY(last_look);
    if (*step != Step::kStuck) return {};
    SPARKVOD_TRY(health_());
    const Result departed = CheckPeers(news);
    SPARKVOD_TRY(attempt(step));  // whoever has left may have done its part before
    return *step == Step::kStuck ? departed : Result::Ok();
  }

  // Tries `attempt` until it is done, or nothing has moved for the collective's deadline. `peer` is
  // whom it waits for, -1 when that is many; the attempt may change it.
  template <typename Attempt>
  Result Progress(Sleeper state, const int& peer, Attempt attempt) {
    Deadline deadline, warning;
    bool armed = false;
    for (;;) {
      Step step;
      SPARKVOD_TRY(Await(state, armed ? deadline.LeftMs(kSleepMs) : kFirstSleepMs, attempt, &step));
      if (armed && step != Step::kStuck) PublishWait(-1);
      if (step == Step::kDone) return {};
      if (step == Step::kMoved) {
        armed = false;
      } else if (!armed) {
        // The clock is read only by those who sleep, so the deadline begins with the first sleep's
        // end.
        armed = true;
        PublishWait(peer);
        deadline = Deadline::After(timeout_);
        warning = Deadline::After(warn_after_);
      } else if (deadline.Passed()) {
        SPARKVOD_TRY(CheckPeers(true));
        return TimedOut(peer);
      } else if (warning.Passed()) {
        log_.Warning(Waited(peer, warn_after_) + " (SPARKVOD_STALL_CHECK_TIME_SECONDS)");
        warning = Deadline::After(warn_after_);
      }
    }
  }

  // The error when a peer has left. With `thorough` every link is asked, else only what lies in
  // shared memory.
  Result CheckPeers(bool thorough);
  // Enriches a channel's error with who the peer is and what it said.
  Result Blame(int peer, const Result& cause);
  uint64_t sleeps() const { return sleeps_; }
  // Whether waits sleep at once, because nobody needs what comes of them soon and the cores have
  // better to do. Of the world's communicator; any thread may change it.
  void SetPatient(bool patient) { patient_.store(patient, std::memory_order_relaxed); }

  // Where the phases of what follows are told; null (the default): nowhere.
  void TellTo(Timeline* timeline) { timeline_ = timeline; }
  Timeline* timeline() const { return timeline_; }

 private:
  static constexpr int kFirstSleepMs = 100;
  static constexpr int kSleepMs = 1000;  // longest sleep between two looks at the deadline
  // A peer on a core of its own answers within 1 us. Who has spun for longer asks whether it is
  // beside another rank; later it offers the core to whoever else may want it.
  static constexpr int64_t kPartNs = 1000;
  static constexpr int64_t kAloneNs = 10000;
  // Ranks of a core that rather offer it to each other than sleep at once. Measured on two cores:
  // allreduces of 4 B to 64 KiB of 4 and of 8 ranks take a quarter of the time so, negotiations of
  // 16 ranks one and a half times as long.
  static constexpr int kMostRanksPerCore = 4;
  static constexpr int kFirstLooks = 16;
  static constexpr int kSpinsPerLook =
      4;  // so that spinning leaves the peer's cache lines alone for a while

  // Where a local rank's phase lies, and what it publishes.
  struct Lane {
    std::atomic<uint64_t>* phase = nullptr;
    char* slots = nullptr;
    char* staging = nullptr;
  };

  void FindTransport();
  Result TimedOut(int peer) const;
  std::string Waited(int peer, double seconds) const;
  // Tells this host's ranks for whom this one waits, so that who waits for it says so; -1: nobody.
  // What was published when a wait failed stays: the others may fail in the same moment.
  void PublishWait(int peer);
  // A rank's name, and for whom it waits itself, where this host knows that.
  std::string Awaited(int peer) const;
  // `peer` is a rank of the world.
  Result Lost(int peer, const Departure& how) const;

  World* world_;
  Timeline* timeline_ = nullptr;
  std::vector<int> ranks_;  // of the world, by rank
  Topology topology_;
  std::vector<Arena*> arenas_;  // by local rank
  std::vector<Lane> lanes_;
  std::function<Result()> health_;
  std::string transport_;
  std::string doing_ = "negotiation";
  const std::string* tensor_ = nullptr;
  size_t others_ = 0;
  Cores cores_;
  int64_t spin_ns_;
  bool crowded_;  // ranks outnumber cores
  std::atomic<bool> own_patience_{false};
  std::atomic<bool>& patient_ = own_patience_;  // of a set: the world's
  // Some peer was found lost. Its socket said so but once, and what was waited for then may have
  // come all the same.
  bool own_lost_ = false;
  bool& lost_ = own_lost_;  // of a set: the world's
  double timeout_, warn_after_;
  Logger log_;
  uint64_t phase_ = 0;
  uint64_t sleeps_ = 0;
  uint32_t departures_ = 0;  // that CheckPeers has looked at
};

}  // namespace sparkvod
