#include "native/collectives/flat.h"

#include "native/collectives/recursive.h"
#include "native/collectives/ring.h"
#include "native/collectives/tree.h"

namespace sparkvod {

Result FlatAllreduce(Algorithm algorithm, Communicator& comm, const Party& party, DType dtype,
                     void* data, size_t count, Finish finish) {
  switch (algorithm) {
    case Algorithm::kHalvingDoubling:
      return HalvingDoublingAllreduce(comm, party, dtype, data, count, finish);
    case Algorithm::kDoubling:
      return DoublingAllreduce(comm, party, dtype, data, count, finish);
    case Algorithm::kTree:
      return TreeAllreduce(comm, party, dtype, data, count, finish);
    default:
      return RingAllreduce(comm, party, dtype, data, count, finish);
  }
}

}  // namespace sparkvod
