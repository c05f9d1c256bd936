// Which agreed operations are executed together: the fusion plan.
#pragma once

#include <cstddef>
#include <vector>

#include "native/engine/negotiator.h"

namespace sparkvod {

// Either one operation that is no allreduce, or the parts of one backend call.
struct Batch {
  struct Piece {
    size_t agreed;  // index into the agreed list
    size_t entry;
  };
  std::vector<Piece> pieces;
  AllreduceCall call;
  int32_t process_set = 0;
  size_t bytes = 0;
};

// Where entry e lies in each rank's arena; empty unless every rank has it in engine memory.
std::vector<int64_t> PlacementOf(const std::vector<Request>& by_rank, size_t e);

// Small tensors of one dtype, operation and scaling meet in one call of at most `threshold` bytes;
// tensors of 1 MiB and more, and those that lie in engine memory on every rank, go alone, since
// putting them together would cost copies. The plan depends on nothing but what all ranks know, so
// all ranks make the same. Operations that disagree are left out.
std::vector<Batch> PlanBatches(const std::vector<Agreed>& agreed, size_t threshold);

}  // namespace sparkvod
