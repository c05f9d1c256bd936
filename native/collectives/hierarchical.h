// Allreduce over several hosts with several ranks each.
//
// Inside a host through shared memory, between hosts over channels: every local rank carries its
// own share of the data across, over its own stream, so no rank is a funnel. H hosts with L ranks
// each, N bytes:
//   1. rank l of each host sums share l of its host's buffers: N bytes read, N/L written
//   2. the ranks l of all hosts make an allreduce of share l over channels: by ring 2N/L (H-1)/H
//      bytes over the network
//   3. everybody copies the other shares from its host's buffers: N bytes read and written
// A flat ring of all H·L ranks sends 2N bytes into and out of each host, as this does, but in
// 2(HL-1) steps that wait for each other instead of 2(H-1), and moves them through every rank.
#pragma once

#include <vector>

#include "native/base/dtype.h"
#include "native/collectives/communicator.h"
#include "native/collectives/cost.h"
#include "native/kernels/reduce.h"

namespace sparkvod {

// Needs hosts with equally many ranks that share memory. `offsets`: where each local rank's buffer
// lies in its arena. `across`: the algorithm between hosts.
Result HierarchicalAllreduce(Communicator& comm, Algorithm across, DType dtype,
                             const std::vector<int64_t>& offsets, size_t count, Finish finish);

}  // namespace sparkvod
