#include "native/kernels/loops.h"
#include "native/kernels/pairs.h"
#include "native/kernels/tables.h"

namespace sparkvod {

const Kernels kAvx512Kernels = {Isa::kAvx512, SumTo, Scale, CopyStreaming, Products, WeightedSum};

}  // namespace sparkvod
