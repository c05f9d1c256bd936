// For CPUs whose vectors the portable kernels already use fully (NEON on aarch64).
#include "native/kernels/tables.h"

namespace sparkvod {

const Kernels* FindKernels(Isa isa) { return isa == Isa::kPortable ? &kPortableKernels : nullptr; }

}  // namespace sparkvod
