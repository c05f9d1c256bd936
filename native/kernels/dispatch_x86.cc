// Asks the CPU, and through it the operating system, which vectors it has.
#include <cpuid.h>

#include "native/kernels/tables.h"

namespace sparkvod {
namespace {

// Clang before 15 has no name for it in __builtin_cpu_supports.
bool HasF16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

}  // namespace

const Kernels* FindKernels(Isa isa) {
  __builtin_cpu_init();
  switch (isa) {
    case Isa::kPortable:
      return &kPortableKernels;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && HasF16c() && __builtin_cpu_supports("fma")
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
