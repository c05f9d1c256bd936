#include "native/kernels/loops.h"
#include "native/kernels/tables.h"

namespace sparkvod {

const Kernels kPortableKernels = {Isa::kPortable, SumTo, Scale, CopyStreaming};

}  // namespace sparkvod
