// Allreduce over channels by any of the algorithms that need no shared memory.
#pragma once

#include "native/base/dtype.h"
#include "native/collectives/communicator.h"
#include "native/collectives/cost.h"
#include "native/collectives/party.h"
#include "native/kernels/reduce.h"

namespace sparkvod {

// In place. `algorithm`: ring, halving-doubling, doubling or tree.
Result FlatAllreduce(Algorithm algorithm, Communicator& comm, const Party& party, DType dtype,
                     void* data, size_t count, Finish finish);

}  // namespace sparkvod
