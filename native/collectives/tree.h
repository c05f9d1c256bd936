// Collectives along a binomial tree of ranks.
//
// Counted from the root, rank v's parent is v without its lowest bit, so the ranks below v are the
// ones that follow it: v, v+1, ... v + lowest bit - 1. Neighbours, which share a host as a rule,
// are near each other in the tree, and few edges cross hosts.
#pragma once

#include "native/base/dtype.h"
#include "native/collectives/communicator.h"
#include "native/collectives/party.h"
#include "native/kernels/reduce.h"

namespace sparkvod {

// From the rank at place `root` of the party. Every rank passes on what has come while the rest is
// on its way. Cost ⌈log2 n⌉·(α + Nβ): fewest steps, but the root sends the data so often.
Result TreeBroadcast(Communicator& comm, const Party& party, void* data, size_t bytes, int root);

// Reduces to the party's first rank, which gives all the result, in place. Cost 2·⌈log2 n⌉·(α +
// Nβ) + ⌈log2 n⌉·Nγ, in 2(n-1) messages, the fewest that there can be.
Result TreeAllreduce(Communicator& comm, const Party& party, DType dtype, void* data, size_t count,
                     Finish finish);

}  // namespace sparkvod
