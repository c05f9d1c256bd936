#include "native/kernels/loops.h"
#include "native/kernels/pairs.h"
#include "native/kernels/tables.h"

namespace sparkvod {

const Kernels kPortableKernels = {Isa::kPortable, SumTo,    Scale,
                                  CopyStreaming,  Products, WeightedSum};

}  // namespace sparkvod
