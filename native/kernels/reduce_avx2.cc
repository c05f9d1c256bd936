#include "native/kernels/loops.h"
#include "native/kernels/pairs.h"
#include "native/kernels/tables.h"

namespace sparkvod {

const Kernels kAvx2Kernels = {Isa::kAvx2, SumTo, Scale, CopyStreaming, Products, WeightedSum};

}  // namespace sparkvod
