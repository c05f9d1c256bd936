// Which agreed operations are executed together: the fusion plan.
#pragma once

#include <cstddef>
#include <vector>

#include "native/engine/negotiator.h"

namespace sparkvod {

// The parts of one backend call.
struct Batch {
  struct Piece {
    size_t agreed;  // index into the agreed list
    size_t entry;
  };
  std::vector<Piece> pieces;
  AllreduceCall call;  // of what reduces, without its parts; else of nothing
  Collective collective = Collective::kAllreduce;
  int32_t process_set = 0;
  size_t bytes = 0;  // what all ranks have in the end, of an allgather; else what one has
};

// Where entry e lies in each rank's arena; empty unless every rank has it in engine memory.
std::vector<int64_t> PlacementOf(const std::vector<Request>& by_rank, size_t e);

// Small tensors of one dtype, operation and scaling meet in one call of at most `threshold` bytes;
// tensors of 1 MiB and more, and those that lie in engine memory on every rank, go alone, since
// putting them together would cost copies. Allgathers (of any dtypes) and reducescatters meet up to
// 64 KiB each, because they are copied to get together. The plan depends on nothing but what all
// ranks know, so all ranks make the same. Operations that disagree are left out.
std::vector<Batch> PlanBatches(const std::vector<Agreed>& agreed, size_t threshold);

}  // namespace sparkvod
