// Asks the CPU, and through it the operating system, which vectors it has.
#include "native/kernels/tables.h"

namespace sparkvod {

const Kernels* FindKernels(Isa isa) {
  __builtin_cpu_init();
  switch (isa) {
    case Isa::kPortable:
      return &kPortableKernels;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
                     __builtin_cpu_supports("fma")
                 ? &kAvx2Kernels
                 : nullptr;
    case Isa::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
                 ? &kAvx512Kernels
                 : nullptr;
  }
  return nullptr;
}

}  // namespace sparkvod
