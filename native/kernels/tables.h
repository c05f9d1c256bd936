// The tables that the files of each instruction set define. On a CPU of another family only the
// portable one exists.
#pragma once

#include "native/kernels/reduce.h"

namespace sparkvod {

extern const Kernels kPortableKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

// Chosen at build time: dispatch_x86.cc or dispatch_portable.cc.
const Kernels* FindKernels(Isa isa);

}  // namespace sparkvod
