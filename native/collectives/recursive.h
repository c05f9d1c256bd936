// Allreduce in logarithmically many steps between pairs of ranks, for any number of ranks.
//
// Pairs need a power of two. Of n = p + e ranks, p the largest power of two, the first 2e make e
// pairs: the second of a pair gives its data to the first, sits out, and is given the result.
// (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
// 2005.) That costs e ranks 2(α + Nβ) + Nγ more; with a power of two it costs nothing.
//
// All ranks end with the same bits: each element is either combined by one rank alone, or by both
// of a pair in the order of their places.
#pragma once

#include "native/base/dtype.h"
#include "native/collectives/communicator.h"
#include "native/collectives/party.h"
#include "native/kernels/reduce.h"

namespace sparkvod {

// Recursive halving, then doubling, in place: log2 p steps of reduce-scatter in which a pair gives
// each other the half that the other keeps, then the same steps backwards. Cost 2·log2 p·α +
// 2N(p-1)/p·β + N(p-1)/p·γ. The first steps, which move most, are between neighbours, so that ranks
// of one host, which are neighbours as a rule, keep them off the network.
Result HalvingDoublingAllreduce(Communicator& comm, const Party& party, DType dtype, void* data,
                                size_t count, Finish finish);

// Recursive doubling, in place: in log2 p steps a pair exchanges everything. Cost log2 p·(α + Nβ +
// Nγ): the fewest steps, for small data.
Result DoublingAllreduce(Communicator& comm, const Party& party, DType dtype, void* data,
                         size_t count, Finish finish);

}  // namespace sparkvod
