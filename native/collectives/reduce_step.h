// The step that reductions over channels are made of.
#pragma once

#include "native/base/dtype.h"
#include "native/collectives/communicator.h"
#include "native/kernels/reduce.h"

namespace sparkvod {

// What is combined, or passed on, at a time: small enough to stay in the caches, large enough to be
// worth a call.
constexpr size_t kStepPieceBytes = 128 << 10;

// Sends `out_bytes` of `out` to one rank; combines the `in_bytes` that come from another, piece by
// piece while the rest is on its way, with `addend` into `sum`. `sum` may be the addend, but must
// not overlap what is sent. `piece` is where pieces arrive, kept from step to step.
Result ReduceStep(Communicator& comm, int to, const char* out, size_t out_bytes, int from,
                  const char* addend, char* sum, size_t in_bytes, DType dtype, const Finish& finish,
                  std::vector<char>* piece);

}  // namespace sparkvod
