// Collectives over channels, whatever lies between the ranks.
#pragma once

#include <vector>

#include "native/base/dtype.h"
#include "native/collectives/communicator.h"
#include "native/collectives/party.h"
#include "native/kernels/reduce.h"

namespace sparkvod {

// Ring allreduce in place: n-1 steps of reduce-scatter, then n-1 of allgather; each rank sends
// 2N(n-1)/n bytes, which is the least possible. Cost 2(n-1)α + 2N(n-1)/n·β + N(n-1)/n·γ. (Patarasuk
// and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.) What
// arrives is summed piece by piece while the rest is on its way.
Result RingAllreduce(Communicator& comm, const Party& party, DType dtype, void* data, size_t count,
                     Finish finish);

// Ring allgather: block r of `data`, which is offsets[r] to offsets[r+1] (bytes), is rank r's and
// ends on every rank.
Result RingAllgather(Communicator& comm, char* data, const std::vector<size_t>& offsets);
// Of blocks of `bytes` each.
Result RingAllgather(Communicator& comm, char* data, size_t bytes);

// Ring reduce-scatter: rank r gets elements begins[r] to begins[r+1] of the result. Cost
// (n-1)(α + N/n·(β + γ)).
Result RingReducescatter(Communicator& comm, DType dtype, const void* in, void* out,
                         const std::vector<size_t>& begins, Finish finish);

// Pairwise alltoall: in step s with the ranks s before and s behind, so that nobody is asked by two
// at a time. bytes[q * n + r]: what rank q sends to rank r. Cost (n-1)α + Nβ.
Result PairwiseAlltoall(Communicator& comm, const void* in, char* out,
                        const std::vector<size_t>& bytes);

// Pipelined chain from root upwards (modulo n): cost (n-2+pieces)·(α + piece·β).
Result ChainBroadcast(Communicator& comm, void* data, size_t bytes, int root);

}  // namespace sparkvod
