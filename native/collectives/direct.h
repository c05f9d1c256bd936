// Allreduce between ranks that share memory.
//
// n ranks, N bytes each. The machine's limit is the memory traffic, so the algorithms differ in how
// often a byte is moved:
//   in place   every rank sums its n-th of all buffers where they lie and writes it to all: reads
//   N, writes N per rank. staged     each rank publishes what the others reduce, reduces its own
//   n-th, copies the others' results back:
//              about 2N (n-1)/n copied beside the sum. For buffers that the peers cannot see.
//   one-shot   everybody publishes everything and sums everything itself: n N read, but one
//   synchronisation only.
// In each, every element is summed in rank order by whoever sums it, so all ranks hold the same
// bits.
#pragma once

#include <vector>

#include "native/base/dtype.h"
#include "native/collectives/communicator.h"
#include "native/kernels/reduce.h"

namespace sparkvod {

// A piece of a collective's data; in and out may be the same.
struct Part {
  const void* in = nullptr;
  void* out = nullptr;
  size_t count = 0;      // elements
  bool neutral = false;  // the neutral element, which no prescale changes
};

// Parts together at most Geometry::kSlotBytes, each rounded up to 64 bytes.
Result OneShotAllreduce(Communicator& comm, DType dtype, const std::vector<Part>& parts,
                        Finish finish);
// Its two halves: laying the parts down, and reducing what all ranks (`places`, by rank) laid down.
void OneShotPublish(DType dtype, const std::vector<Part>& parts, char* to);
Result OneShotReduce(Communicator& comm, DType dtype, const std::vector<Part>& parts,
                     const std::vector<const char*>& places, Finish finish);
// Bytes that `parts` take in a slot.
size_t OneShotBytes(DType dtype, const std::vector<Part>& parts);

// Where the share of rank r of n begins: equal shares of whole cache lines.
size_t ShareBegin(DType dtype, size_t count, int r, int n);

// Whether all ranks' inputs are known to be there when a collective begins: what was submitted is,
// since all have agreed on it; what the ranks have written since is not.
enum class Inputs { kSubmitted, kWritten };

// `offsets`: where each rank's buffer lies in its arena.
Result InPlaceAllreduce(Communicator& comm, DType dtype, const std::vector<int64_t>& offsets,
                        size_t count, Finish finish, Inputs inputs);

Result StagedAllreduce(Communicator& comm, DType dtype, const Part& part, Finish finish);

}  // namespace sparkvod
