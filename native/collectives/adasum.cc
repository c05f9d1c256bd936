#include "native/collectives/adasum.h"

#include <cmath>

#include "native/kernels/reduce.h"

namespace sparkvod {
namespace {

// Products of float64 have more exponents than a double. They cross the ranks as sums of large,
// ordinary and small ones, each with a unit of its own; those of other dtypes are ordinary.
constexpr double kLarge = 0x1p512, kSmall = 0x1p-512;
constexpr int kUnit = 1200;

size_t PartsOf(DType dtype) { return dtype == DType::kFloat64 ? 3 : 1; }

void Append(long double product, size_t parts, std::vector<double>* numbers) {
  if (parts == 1) return numbers->push_back(static_cast<double>(product));
  const long double size = std::fabs(product);
  double part[3] = {};
  if (size >= kSmall && size <= kLarge)
    part[0] = static_cast<double>(product);
  else if (size < kSmall)
    part[1] = static_cast<double>(std::ldexp(product, kUnit));
  else  // or no number at all
    part[2] = static_cast<double>(std::ldexp(product, -kUnit));
  numbers->insert(numbers->end(), part, part + 3);
}

long double TakeOne(size_t parts, const double** next) {
  const double* const part = *next;
  *next += parts;
  if (parts == 1) return part[0];
  const long double small = part[1], large = part[2];
  return part[0] + std::ldexp(small, -kUnit) + std::ldexp(large, kUnit);
}

// What a vector is multiplied by whose square is `square`: 1 − product/2‖v‖². A vector of zeros has
// no direction, so the other is taken unchanged.
long double Factor(long double product, long double square) {
  return square > 0 ? 1 - product / (2 * square) : 1;
}

}  // namespace

Result AdasumTree(const AdasumShare& share, const SumDoubles& sum) {
  const size_t n = share.vectors.size(), tensors = share.ends.size(), size = SizeOf(share.dtype);
  const size_t parts = PartsOf(share.dtype);
  const auto begin = [&](size_t t) { return t == 0 ? 0 : share.ends[t - 1]; };
  // At each level vectors that are multiples of `step` are left.
  for (size_t step = 1; step < n; step *= 2) {
    std::vector<double> products;
    for (size_t a = 0; a + step < n; a += 2 * step)
      for (size_t t = 0; t < tensors; ++t) {
        long double three[3];
        BestKernels().products(share.dtype, share.vectors[a] + begin(t) * size,
                               share.vectors[a + step] + begin(t) * size, share.ends[t] - begin(t),
                               three);
        for (const long double product : three) Append(product, parts, &products);
      }
    SPARKVOD_TRY(sum(&products));
    const double* next = products.data();
    for (size_t a = 0; a + step < n; a += 2 * step)
      for (size_t t = 0; t < tensors; ++t) {
        const long double ab = TakeOne(parts, &next), aa = TakeOne(parts, &next),
                          bb = TakeOne(parts, &next);
        char* const to = share.vectors[a] + begin(t) * size;
        BestKernels().weighted_sum(share.dtype, to, to, Factor(ab, aa),
                                   share.vectors[a + step] + begin(t) * size, Factor(ab, bb),
                                   share.ends[t] - begin(t));
      }
  }
  return {};
}

}  // namespace sparkvod
