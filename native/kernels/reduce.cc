#include "native/kernels/reduce.h"

#include "native/kernels/tables.h"

namespace sparkvod {

const char* NameOf(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return "portable";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

const Kernels* KernelsFor(Isa isa) { return FindKernels(isa); }

std::vector<const Kernels*> AllKernels() {
  std::vector<const Kernels*> all;
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512})
    if (const Kernels* kernels = FindKernels(isa)) all.push_back(kernels);
  return all;
}

const Kernels& BestKernels() {
  static const Kernels& best = *AllKernels().back();
  return best;
}

}  // namespace sparkvod
