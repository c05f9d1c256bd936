// Allgather, alltoall, broadcast and reducescatter between ranks that share memory.
//
// What they rest on, beside the phases of Communicator:
//   * A rank's slot of one parity is read by nobody when it is written: its readers have arrived at
//   the next phase since.
//   * Whoever publishes anything settles before, so a rank may leave a collective while others
//   still read what it published.
#pragma once

#include <vector>

#include "native/base/dtype.h"
#include "native/collectives/communicator.h"
#include "native/collectives/direct.h"
#include "native/kernels/reduce.h"

namespace sparkvod {

// Bytes that one rank wants another to have: `from` here, at `to` in that rank's output.
struct Block {
  const void* from = nullptr;
  size_t to = 0;
  size_t bytes = 0;
};

// blocks[r] goes to rank r, whose output lies in its arena, this rank's at `output`. Every rank
// writes its blocks where they end, so each byte is moved once. Cost 2α + Nβ.
Result PushBlocks(Communicator& comm, const char* output, const std::vector<Block>& blocks);

// Bytes `at` in what a rank laid down, that belong `to` in this rank's output.
struct Fetch {
  size_t at = 0;
  size_t to = 0;
  size_t bytes = 0;
};

// Every rank lays at most Geometry::kSlotBytes down in its slot and fetches from the others'
// (fetches[r] from rank r): one synchronisation. Cost α + 2Nβ.
Result PassBlocks(Communicator& comm, const void* own, size_t own_bytes,
                  const std::vector<Fetch>& fetches, char* output);

// From the root's memory: through its slot, from where it was submitted (root_offset >= 0), or
// through its staging area in chunks, of which one is written while the other is read.
Result DirectBroadcast(Communicator& comm, void* data, size_t bytes, int root, int64_t root_offset);

// Rank r gets elements begins[r] to begins[r+1]. `placement`: where each rank's input lies in its
// arena; empty: in ordinary memory, of which each rank publishes what the others reduce.
Result DirectReducescatter(Communicator& comm, DType dtype, const void* in, void* out,
                           const std::vector<size_t>& begins, const std::vector<int64_t>& placement,
                           Finish finish, Inputs inputs);

}  // namespace sparkvod
