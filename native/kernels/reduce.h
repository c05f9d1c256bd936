// The arithmetic of the collectives: sums of many arrays, scaling, copies.
//
// One set of kernels per instruction set, chosen when first asked for. All are plain functions that
// neither allocate nor fail. Arrays need no alignment beyond their element's, of which not even
// that is used.
//
// Results do not depend on the instruction set: every set combines in the order of the sources, in
// float32 for float16 and bfloat16, and rounds once, to nearest even, when it writes. (Where
// several sources hold a NaN, which one's payload survives is not specified.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "native/base/dtype.h"

namespace sparkvod {

// How two elements become one. Sums and products of integers wrap. Of bool the sum and the maximum
// are the logical or, the product and the minimum the logical and. A NaN in any source makes the
// result one, in minima and maxima too.
enum class Combine : uint8_t { kSum = 0, kMin, kMax, kProduct };
constexpr int kCombineCount = 4;

// How sources become a result, and what becomes of that before it is written. Floating dtypes are
// multiplied by `scale`. Integers are divided by `divisor`, truncating, and then, when scale is not
// 1, go through double (truncating, saturating). bool takes neither.
struct Finish {
  double scale = 1.0;
  int64_t divisor = 1;
  Combine combine = Combine::kSum;

  // The same without scale and divisor, for results that go on to be combined.
  Finish Partial() const { return {1.0, 1, combine}; }
};

enum class Isa : uint8_t { kPortable = 0, kAvx2, kAvx512 };
const char* NameOf(Isa isa);

struct Kernels {
  Isa isa;

  // dsts[d][i] = finish(srcs[0][i] + … + srcs[nsrc-1][i]) for every d and i < n, + being
  // finish.combine, reading and writing each array once. A destination may be one of the sources,
  // or must not overlap any. At least one source and one destination.
  void (*sum_to)(DType dtype, void* const* dsts, int ndst, const void* const* srcs, int nsrc,
                 size_t n, Finish finish) noexcept;

  // dst[i] = src[i] * factor, in the dtype's arithmetic (float32 for halves; integers through
  // double, truncating and saturating; bool is copied). dst may be src.
  void (*scale)(DType dtype, void* dst, const void* src, size_t n, double factor) noexcept;

  // memcpy past the caches. Faster than memcpy (90 beside 60 GB/s measured, from a small source
  // into 64 MiB) where the destination is neither in a cache nor read soon; slower (0.7 times)
  // where it is in one.
  void (*copy_streaming)(void* dst, const void* src, size_t nbytes) noexcept;

  // out = {a·b, a·a, b·b}, of floating dtypes, accumulated in double or wider. They neither
  // overflow nor vanish, those of float64 included. The last bits depend on the instruction set.
  void (*products)(DType dtype, const void* a, const void* b, size_t n, long double* out) noexcept;

  // dst[i] = a[i] * of_a + b[i] * of_b, of floating dtypes, in double or wider, so that a factor
  // may be greater than the dtype's greatest number; dst may be a or b.
  void (*weighted_sum)(DType dtype, void* dst, const void* a, long double of_a, const void* b,
                       long double of_b, size_t n) noexcept;

  // dst[i] = a[i] + b[i]; dst may be a or b.
  void Add(DType dtype, void* dst, const void* a, const void* b, size_t n) const noexcept {
    const void* const srcs[2] = {a, b};
    sum_to(dtype, &dst, 1, srcs, 2, n, Finish{});
  }
};

// The fastest kernels that this CPU and operating system run.
const Kernels& BestKernels();

// The kernels of one instruction set, nullptr where the CPU or the build lacks it.
const Kernels* KernelsFor(Isa isa);

// Every set that runs here, the portable one first.
std::vector<const Kernels*> AllKernels();

}  // namespace sparkvod
