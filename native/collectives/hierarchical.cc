#include "native/collectives/hierarchical.h"

#include <cstring>

#include "native/collectives/direct.h"
#include "native/collectives/flat.h"

namespace sparkvod {

Result HierarchicalAllreduce(Communicator& comm, Algorithm across, DType dtype,
                             const std::vector<int64_t>& offsets, size_t count, Finish finish) {
  const Topology& topology = comm.topology();
  const int n = topology.local_size, me = topology.local_rank;
  const size_t size = SizeOf(dtype);
  const auto buffer = [&](int l) { return comm.arena(l).base() + offsets[static_cast<size_t>(l)]; };
  const auto begin = [&](int l) { return ShareBegin(dtype, count, l, n); };
  const size_t share = begin(me + 1) - begin(me);
  char* const own = buffer(me) + begin(me) * size;

  SPARKVOD_TRY(comm.AwaitPhase(comm.Arrive()));  // everybody's buffer is filled
  if (share > 0) {
    const Phase summing(comm.timeline(), "reduce in host");
    std::vector<const void*> srcs;
    for (int l = 0; l < n; ++l) srcs.push_back(buffer(l) + begin(me) * size);
    void* dst = own;
    BestKernels().sum_to(dtype, &dst, 1, srcs.data(), n, share, finish.Partial());
  }
  SPARKVOD_TRY(FlatAllreduce(across, comm, {topology.cross_ranks, topology.cross_rank}, dtype, own,
                             share, finish));
  SPARKVOD_TRY(comm.AwaitPhase(comm.Arrive()));  // everybody's share is final
  {
    const Phase copying(comm.timeline(), "copy in host");
    for (int l = 0; l < n; ++l)
      if (l != me && begin(l + 1) > begin(l))
        std::memcpy(buffer(me) + begin(l) * size, buffer(l) + begin(l) * size,
                    (begin(l + 1) - begin(l)) * size);
  }
  return comm.AwaitPhase(comm.Arrive());  // everybody has copied, so buffers may change
}

}  // namespace sparkvod
