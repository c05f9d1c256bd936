// Everything at once, at random: collectives of all kinds and sizes in several sets, from engine
// memory and other, in another order on each rank; waits by the caller, by other threads, by asking
// and by being called; disagreements, knobs that change, sets that go and ranks that join
// meanwhile; and ranks that leave in the middle of it. Every result is known to the last bit.
//
// sparkvod_tests --seed=N Stress runs the worlds of one seed, which each run says.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <memory>
#include <thread>

#include "tests/native/engine/stress_plan.h"

namespace sparkvod {
namespace {

using namespace check;  // NOLINT: a test of what check's worlds run

void Nap(uint64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

// A collective of this rank on its way.
struct Started {
  std::string what;
  Share share;
  bool odd = false;  // the ranks disagree
  std::vector<Block> in, out;
  std::vector<bool> apart;  // what is in `out`, not in place
  int64_t handle = 0;       // 0: `called` counts
  bool woken = true;        // the background thread knows of it
  std::shared_ptr<Operation> operation;
  Result result;
  std::vector<Output> outputs;
  std::atomic<int> called{0};
};

// One rank of a world that does what the plan says. `breaks`: some rank leaves meanwhile.
class Rank {
 public:
  Rank(Engine& engine, const Plan& plan, uint64_t seed, bool breaks)
      : engine_(engine),
        plan_(plan),
        breaks_(breaks),
        rank_(engine.topology().rank),
        dice_(seed * 64 + static_cast<uint64_t>(rank_) + 1) {}

  void Run() {
    for (const Epoch& epoch : plan_.epochs) {
      if (broken_.load()) break;
      RunEpoch(epoch);
    }
    FinishAll(&earlier_);
    FinishAll(&now_);
  }
  bool broken() const { return broken_.load(); }

 private:
  using Many = std::vector<std::unique_ptr<Started>>;

  void RunEpoch(const Epoch& epoch) {
    sets_ = &epoch.sets;
    ids_.assign(1, 0);
    for (size_t s = 1; s < epoch.sets.size(); ++s) ids_.push_back(AddSet(epoch.sets[s]));
    std::thread beside([&] { Beside(epoch.beside); });
    for (const auto& window : epoch.windows) {
      if (broken_.load()) break;
      RunWindow(window);
    }
    // What is pending in a set would fail, on some ranks, with its removal.
    Many of_world;
    for (auto& s : earlier_)
      if (s->share.request.process_set == 0 && epoch.drops_sets)
        of_world.push_back(std::move(s));
      else
        Finish(*s);
    earlier_ = std::move(of_world);
    for (size_t s = 1; s < epoch.sets.size(); ++s) RemoveSet(ids_[s]);
    beside.join();
    if (epoch.joins.empty()) return;
    FinishAll(&earlier_);
    JoinAfter(epoch.joins);
  }

  void RunWindow(std::vector<Step> steps) {
    dice_.Shuffle(&steps);
    for (size_t i = 0; i < steps.size() && !broken_.load(); ++i) {
      if (dice_.OneIn(8)) Nap(dice_.Below(300));
      const bool last = i + 1 == steps.size();
      const bool waits = last && dice_.OneIn(2);
      Start(steps[i], !waits);
      // Who waits at once need not wake anybody.
      if (waits && !now_.empty() && now_.back()->handle != 0) Finish(*now_.back()), now_.pop_back();
      if (!earlier_.empty() && dice_.OneIn(2)) FinishOne(&earlier_);
    }
    while (!now_.empty() && dice_.OneIn(2)) FinishOne(&now_);
    FinishAll(&earlier_);
    earlier_.swap(now_);
  }

  void Start(const Step& step, bool wake) {
    const std::vector<int64_t>& ranks = (*sets_)[step.set];
    const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
    const bool tunes = step.collective == Collective::kTune;
    if (mine == ranks.end() || (tunes && step.root >= 0 && step.root != rank_)) return;
    auto s = std::make_unique<Started>();
    s->share = ShareOf(step, ranks, static_cast<int>(mine - ranks.begin()));
    s->odd = step.odd >= 0;
    Request& request = s->share.request;
    request.process_set = ids_[step.set];
    s->what = request.name + ", " + request.Describe();
    std::vector<Part> parts;
    s->in.reserve(request.entries.size());
    s->out.reserve(request.entries.size());
    for (size_t k = 0; k < request.entries.size(); ++k) parts.push_back(PartOf(s.get(), k));
    Submit(std::move(s), parts, wake);
  }

  Part PartOf(Started* s, size_t k) {
    const Request& request = s->share.request;
    const auto count = static_cast<size_t>(request.entries[k].count());
    s->in.emplace_back(engine_, dice_.OneIn(2), s->share.gives[k]);
    const bool scatters = request.collective == Collective::kReducescatter;
    const bool apart = scatters || dice_.OneIn(3);
    const size_t bytes = scatters ? s->share.becomes[k].size() : s->share.gives[k].size();
    s->out.emplace_back(engine_, false, std::vector<uint8_t>(apart ? bytes : 0, 0xdd));
    s->apart.push_back(apart);
    void* const in = s->in.back().data();
    if (request.collective == Collective::kAllgather || request.collective == Collective::kAlltoall)
      return {in, nullptr, count};
    return {in, apart ? s->out.back().data() : in, count};
  }

  void Submit(std::unique_ptr<Started> s, const std::vector<Part>& parts, bool wake) {
    Result submitted;
    s->woken = wake;
    if (wake && dice_.OneIn(6)) {
      Started* const of = s.get();
      submitted = engine_.Submit(of->share.request, parts, [of](const Operation& operation) {
        of->result = operation.result;
        of->outputs = operation.outputs;
        ++of->called;
      });
    } else {
      submitted = engine_.Submit(s->share.request, parts, wake, &s->handle);
      if (submitted.ok()) EXPECT(engine_.Find(s->handle, &s->operation).ok());
    }
    if (Expected(submitted, s->what)) now_.push_back(std::move(s));
  }

  // False, when a call could not do what it should because some rank has left.
  bool Expected(const Result& result, const std::string& what) {
    if (result.ok()) return true;
    if (breaks_ && (result.code() == Code::kPeerLost || result.code() == Code::kShutDown))
      broken_.store(true);
    else
      Fail(__FILE__, __LINE__, what + ": " + result.Report());
    return false;
  }

  void FinishOne(Many* some) {
    std::swap(some->back(), (*some)[dice_.Below(some->size())]);
    Finish(*some->back());
    some->pop_back();
  }

  void FinishAll(Many* some) {
    dice_.Shuffle(some);
    for (auto& s : *some) Finish(*s);
    some->clear();
  }

  void Finish(Started& s) {
    if (s.handle == 0) {
      while (s.called.load() == 0) Nap(50);
      EXPECT_EQ(s.called.load(), 1);
    } else {
      s.result = Await(s.handle, s.woken);
      s.outputs = s.operation->outputs;
      engine_.Release(s.handle);
    }
    if (s.odd && s.result.code() == Code::kMismatch) return;
    if (!Expected(s.result, s.what)) return;
    if (s.odd) Fail(__FILE__, __LINE__, s.what + " of ranks that disagree");
    for (size_t k = 0; k < s.share.becomes.size(); ++k)
      if (!Holds(s, k))
        Fail(__FILE__, __LINE__,
             s.what + " is wrong on rank " + std::to_string(rank_) + ", tensor " +
                 std::to_string(k));
  }

  static bool Holds(Started& s, size_t k) {
    const std::vector<uint8_t>& becomes = s.share.becomes[k];
    if (s.outputs.empty()) return (s.apart[k] ? s.out : s.in)[k].Holds(becomes);
    const Output& output = s.outputs[k];
    return output.memory->bytes() == becomes.size() &&
           (becomes.empty() ||
            std::memcmp(output.memory->data(), becomes.data(), becomes.size()) == 0);
  }

  bool Done(int64_t handle) {
    bool done = false;
    EXPECT(engine_.Poll(handle, &done).ok());
    return done;
  }

  Result Await(int64_t handle, bool woken) {
    Result result;
    switch (dice_.Below(woken ? 4 : 3)) {
      case 0:
        do result = engine_.Wait(handle, 2e-4);
        while (!Done(handle));
        return engine_.Wait(handle);
      case 1: {
        std::thread other([&] { result = engine_.Wait(handle); });
        other.join();
        return result;
      }
      case 3:
        while (!Done(handle)) Nap(30);
        return engine_.Wait(handle);
      default:
        return engine_.Wait(handle);
    }
  }

  void Beside(size_t count) {
    const int size = engine_.topology().size;
    for (size_t i = 0; i < count && !broken_.load(); ++i) {
      float data[5] = {1, 1, 1, 1, static_cast<float>(i)};
      const Request sum = AllreduceOf("beside", DType::kFloat32, {5});
      if (!Expected(check::Run(engine_, sum, {{data, data, 5}}, i % 3 != 0), "beside")) return;
      EXPECT_EQ(data[4], static_cast<float>(static_cast<size_t>(size) * i));
      EXPECT(engine_.GetStats().cycles > 0);
    }
  }

  int32_t AddSet(const std::vector<int64_t>& ranks) {
    Request request = RequestOf("sparkvod.add_process_set", Collective::kAddSet, {});
    request.splits = ranks;
    int64_t handle = 0;
    std::shared_ptr<Operation> operation;
    if (!Expected(engine_.Submit(request, {}, false, &handle), "add")) return 0;
    EXPECT(engine_.Find(handle, &operation).ok());
    return Expected(End(engine_, handle), "add") ? operation->set->id : 0;
  }

  void RemoveSet(int32_t id) {
    Request request = RequestOf("sparkvod.remove_process_set", Collective::kRemoveSet, {});
    request.root = id;
    if (!broken_.load()) Expected(check::Run(engine_, request, {}), "remove");
  }

  // Each rank goes on for as long as it wants to; of each step is the sum of those that were there.
  void JoinAfter(const std::vector<int>& joins) {
    Request request = RequestOf("sparkvod.join", Collective::kJoin, {});
    const int mine = joins[static_cast<size_t>(rank_)];
    int64_t handle = 0, join = 0;
    std::shared_ptr<Operation> operation;
    for (int step = 0; step <= mine && !broken_.load(); ++step) {
      float sum = 0;
      for (size_t r = 0; r < joins.size(); ++r)
        if (joins[r] > step) sum += static_cast<float>(r + 1);
      std::vector<float> data(step % 2 == 0 ? 3 : 9000, static_cast<float>(rank_ + 1));
      const auto count = static_cast<int64_t>(data.size());
      const Request of_step =
          AllreduceOf("joined" + std::to_string(count), DType::kFloat32, {count});
      const bool goes_on = step < mine;
      if (goes_on && !Expected(engine_.Submit(of_step, {{data.data(), data.data(), data.size()}},
                                              true, &handle),
                               "step"))
        return;
      // Some join while their last step is on its way.
      if (step + 1 >= mine && join == 0 && (!goes_on || dice_.OneIn(2))) {
        if (!Expected(engine_.Submit(request, {}, true, &join), "join")) return;
        EXPECT(engine_.Find(join, &operation).ok());
      }
      if (!goes_on) break;
      if (!Expected(End(engine_, handle), "step of who has not joined")) return;
      EXPECT(data == std::vector<float>(data.size(), sum));
    }
    if (join == 0 || !Expected(End(engine_, join), "join")) return;
    const auto last = static_cast<size_t>(operation->last_joined);
    // Or who joined after one that joined with its last step.
    EXPECT(joins[last] + 1 >= *std::max_element(joins.begin(), joins.end()));
  }

  Engine& engine_;
  const Plan& plan_;
  const bool breaks_;
  const int rank_;
  Dice dice_;
  const std::vector<std::vector<int64_t>>* sets_ = nullptr;
  std::vector<int32_t> ids_;
  Many earlier_, now_;
  std::atomic<bool> broken_{false};
};

enum class Leaving { kNobody, kAbort, kShutdown, kKilled };

// A world of that seed, which `leaving` ends while it works.
void RunStress(const Kind& kind, int size, uint64_t seed, Leaving leaving) {
  const size_t scale = PathsOnly() ? 1 : 2;
  const Plan plan = PlanOf(seed, size, 2, 8 * scale);
  Dice dice(seed + 1);
  const int who = static_cast<int>(dice.Below(static_cast<uint64_t>(size)));
  const uint64_t after_us = dice.Below(20000 * scale);
  WorldOptions options;
  options.config = plan.config;
  // So long that what somebody waits for in vain is a test that hangs.
  options.config.collective_timeout = 600;
  options.hosts = plan.hosts;
  options.shutdown = leaving == Leaving::kNobody;
  options.meet = leaving != Leaving::kNobody;
  if (leaving == Leaving::kKilled) options.killed = {who};
  // Several hosts need another transport between them.
  const bool shared = kind.transport == kShm.transport;
  const Kind any{kInproc.transport, kind.processes};
  RunWorld(
      shared && !plan.hosts.empty() ? any : kind, size,
      [&](Engine& engine, int rank) {
        Rank mine(engine, plan, seed, leaving != Leaving::kNobody);
        std::thread end;
        if (leaving != Leaving::kNobody && rank == who)
          end = std::thread([&] {
            Nap(after_us);
            if (leaving == Leaving::kKilled) ::raise(SIGKILL);
            if (leaving == Leaving::kAbort) engine.Abort("it has had enough");
            if (leaving == Leaving::kShutdown) EXPECT_EQ(engine.Shutdown().Report(), "ok");
          });
        mine.Run();
        if (end.joinable()) end.join();
        if (leaving == Leaving::kShutdown && rank == who) return;
        if (leaving != Leaving::kNobody) EXPECT_EQ(engine.Shutdown().Report(), "ok");
      },
      options);
}

// Worlds of one kind after the other, for some seconds.
void Stress(const std::vector<Kind>& kinds, const std::vector<Leaving>& ends, double seconds) {
  uint64_t seed = Seed();
  std::cout << "      from seed " << seed << std::endl;
  const Deadline deadline = Deadline::After(Full() ? 20 * seconds : seconds);
  do {
    Dice dice(seed);
    const Kind& kind = dice.Of(kinds);
    const int size = dice.Of<int>({2, 3, 5, 8});
    const Leaving leaving = dice.Of(ends);
    const int before = State::Get().failures;
    RunStress(kind, size, seed, leaving);
    if (State::Get().failures > before)
      Fail(__FILE__, __LINE__,
           "seed " + std::to_string(seed) + ": " + std::to_string(size) + " ranks, " +
               kind.transport);
    ++seed;
  } while (!deadline.Passed());
}

TEST(StressOfThreads) { Stress({kInproc, kInproc, kTcp}, {Leaving::kNobody}, 1.5); }

TEST(StressOfProcesses) {
  if (CanFork()) Stress({kShm, kShm, {"tcp", true}}, {Leaving::kNobody}, 1.5);
}

TEST(StressThatThreadsLeave) {
  Stress({kInproc, kInproc, kTcp}, {Leaving::kAbort, Leaving::kShutdown}, 1);
}

TEST(StressThatProcessesLeave) {
  if (CanFork())
    Stress({kShm, kShm, {"tcp", true}}, {Leaving::kAbort, Leaving::kShutdown, Leaving::kKilled}, 1);
}

}  // namespace
}  // namespace sparkvod
