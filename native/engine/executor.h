// Executes what the ranks have agreed on, batch by batch, and counts what carried it.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "native/backends/backend.h"
#include "native/engine/batch.h"
#include "native/engine/stats.h"

namespace sparkvod {

class Executor {
 public:
  // How operations end: called once for each, in the order of completion.
  using Finish = std::function<void(const std::shared_ptr<Operation>&, const Result&)>;

  Executor(World* world, Communicator* comm, std::unique_ptr<Backend> backend,
           size_t fusion_threshold, Finish finish);

  // An error is the engine's end: a peer was lost, or memory is short.
  Result Execute(const std::vector<Agreed>& agreed);
  const Backend& backend() const { return *backend_; }
  // The counters of collectives; thread-safe.
  std::map<std::string, Stats::Carried> Counts() const;

 private:
  Result ExecuteBatch(const Batch& batch, const std::vector<Agreed>& agreed);
  // These count into `bytes` what they move.
  Result Allgather(const Agreed& agreed, Carrier* carrier, size_t* bytes);
  Result Broadcast(const Agreed& agreed, Carrier* carrier, size_t* bytes);
  Result Reducescatter(const Agreed& agreed, Carrier* carrier, size_t* bytes);
  Result Alltoall(const Agreed& agreed, Carrier* carrier, size_t* bytes);
  // Engine memory for the rows of all ranks; `offsets` (bytes) become where each rank's begin.
  Result MakeOutput(Operation* operation, std::vector<int64_t> rows, size_t row_bytes,
                    std::vector<size_t>* offsets);

  World* world_;
  Communicator* comm_;
  std::unique_ptr<Backend> backend_;
  size_t fusion_threshold_;
  Finish finish_;
  mutable std::mutex mutex_;
  std::map<std::string, Stats::Carried> counts_;
};

}  // namespace sparkvod
