#include "native/collectives/reduce_step.h"

#include <algorithm>

namespace sparkvod {

Result ReduceStep(Communicator& comm, int to, const char* out, size_t out_bytes, int from,
                  const char* addend, char* sum, size_t in_bytes, DType dtype, const Finish& finish,
                  std::vector<char>* piece) {
  if (const size_t most = std::min(kStepPieceBytes, in_bytes); piece->size() < most)
    piece->resize(most);
  size_t sent = 0;
  size_t held = 0;  // bytes received into `piece`
  int awaited = in_bytes > 0 ? from : to;
  return comm.Progress(kForMessage, awaited, [&](Communicator::Step* step) -> Result {
    *step = Communicator::Step::kStuck;
    SPARKVOD_TRY(comm.TrySend(to, out, out_bytes, &sent, step));
    const size_t want = std::min(kStepPieceBytes, in_bytes);
    SPARKVOD_TRY(comm.TryRecv(from, piece->data(), want, &held, step));
    if (held > 0 && held == want) {
      const void* srcs[2] = {piece->data(), addend};
      void* dst = sum;
      BestKernels().sum_to(dtype, &dst, 1, srcs, 2, held / SizeOf(dtype), finish);
      sum += held;
      addend += held;
      in_bytes -= held;
      held = 0;
    }
    awaited = in_bytes > 0 ? from : to;
    if (sent == out_bytes && in_bytes == 0) *step = Communicator::Step::kDone;
    return {};
  });
}

}  // namespace sparkvod
