// Executes what the ranks have agreed on, batch by batch, and counts what carried it.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "native/backends/backend.h"
#include "native/engine/batch.h"
#include "native/engine/meter.h"
#include "native/engine/stats.h"

namespace sparkvod {

class Executor {
 public:
  // How operations end: called once for each, in the order of completion.
  using Finish = std::function<void(const std::shared_ptr<Operation>&, const Result&)>;

  Executor(World* world, Communicator* comm, std::unique_ptr<Backend> backend, const Config& config,
           Finish finish);

  // `offers`: what the ranks laid down of the first operation. An error is the engine's end: a peer
  // was lost, or memory is short.
  Result Execute(const std::vector<Agreed>& agreed, std::vector<const char*> offers);
  // Lays down what the others need of an operation, before they have agreed; false: nothing.
  bool Offer(const Operation& operation, char* room, size_t bytes);
  const Backend& backend() const { return *backend_; }
  Meter& meter() { return meter_; }
  // Bytes that the last call of Execute with anything to do has carried; by the driver.
  uint64_t last_bytes() const { return last_bytes_; }

  // The rest is thread-safe.
  Tunables tunables() const;
  // Those that make a difference in this world, with what they may be.
  const std::vector<Tunable>& in_effect() const { return in_effect_; }
  // Whether a tune with these numbers can be done.
  Result CheckTune(const std::vector<int64_t>& numbers) const;
  int64_t linger_ns() const { return linger_ns_.load(std::memory_order_relaxed); }
  // The counters of collectives.
  std::map<std::string, Stats::Carried> Counts() const;

 private:
  // Who executes for a set of ranks: of the world, the communicator and backend of this object.
  struct Target {
    Communicator* comm = nullptr;
    Backend* backend = nullptr;
  };
  // Of a process set that this rank is in. What it publishes passes through `lane`, a block of the
  // heap that only the set's removal frees: when the engine ends, others may still read there what
  // this rank has published last, and pages that are given back would be zero.
  struct OfSet {
    std::unique_ptr<Communicator> comm;
    std::unique_ptr<Backend> backend;
    char* lane = nullptr;
  };

  Target TargetOf(const Request& request);
  Result AddSet(const Operation& operation);
  Result RemoveSet(const Request& request);
  Result Tune(const Request& request);
  Result ExecuteBatch(const Batch& batch, const std::vector<Agreed>& agreed);
  // Of the tensors of a batch; several are copied into one, and back.
  Result Allgather(const Target& target, const Batch& batch, const std::vector<Agreed>& agreed,
                   Carrier* carrier);
  Result Reducescatter(const Target& target, const Batch& batch, const std::vector<Agreed>& agreed,
                       Carrier* carrier);
  // These count into `bytes` what they move.
  Result Broadcast(const Target& target, const Agreed& agreed, Carrier* carrier, size_t* bytes);
  Result Alltoall(const Target& target, const Agreed& agreed, Carrier* carrier, size_t* bytes);
  // Engine memory for the rows of all ranks; `offsets` (bytes) become where each rank's begin.
  Result MakeOutput(std::vector<int64_t> rows, size_t row_bytes, Output* output,
                    std::vector<size_t>* offsets);
  // Engine memory, not zeroed.
  Result Allocate(size_t bytes, std::unique_ptr<Memory>* out);

  World* world_;
  Communicator* comm_;
  std::unique_ptr<Backend> backend_;
  Config config_;
  std::map<int32_t, OfSet> sets_;
  Finish finish_;
  // By collective, transport and algorithm, of which each pointer is one constant.
  using Way = std::tuple<Collective, std::string, const char*>;
  Stats::Carried& CountOf(const Way& way);  // with mutex_ held
  std::vector<Tunable> in_effect_;
  int connected_ = 1;  // streams, at most
  Meter meter_;
  uint64_t carried_bytes_ = 0;
  uint64_t last_bytes_ = ~uint64_t{0};
  std::atomic<int64_t> linger_ns_;
  mutable std::mutex mutex_;
  Tunables tunables_;  // written by the driver, with the mutex held
  std::map<std::string, Stats::Carried> counts_;
  std::map<Way, Stats::Carried*> count_of_;
};

}  // namespace sparkvod
