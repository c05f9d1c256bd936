#include "native/collectives/adasum.h"

#include "native/kernels/reduce.h"

namespace sparkvod {
namespace {

// What a pair of one tensor is combined with: 1 − a·b/2‖a‖², 1 − a·b/2‖b‖². A vector of zeros has
// no direction, so the other is taken as it is.
void Factors(const double* products, double* of_a, double* of_b) {
  const double ab = products[0], aa = products[1], bb = products[2];
  *of_a = aa > 0 ? 1 - ab / (2 * aa) : 1;
  *of_b = bb > 0 ? 1 - ab / (2 * bb) : 1;
}

}  // namespace

Result AdasumTree(const AdasumShare& share, const SumDoubles& sum) {
  const size_t n = share.vectors.size(), tensors = share.ends.size(), size = SizeOf(share.dtype);
  const auto begin = [&](size_t t) { return t == 0 ? 0 : share.ends[t - 1]; };
  // At each level vectors that are multiples of `step` are left.
  for (size_t step = 1; step < n; step *= 2) {
    std::vector<double> products;
    for (size_t a = 0; a + step < n; a += 2 * step)
      for (size_t t = 0; t < tensors; ++t) {
        double three[3];
        BestKernels().products(share.dtype, share.vectors[a] + begin(t) * size,
                               share.vectors[a + step] + begin(t) * size, share.ends[t] - begin(t),
                               three);
        products.insert(products.end(), three, three + 3);
      }
    SPARKVOD_TRY(sum(&products));
    const double* next = products.data();
    for (size_t a = 0; a + step < n; a += 2 * step)
      for (size_t t = 0; t < tensors; ++t, next += 3) {
        double of_a, of_b;
        Factors(next, &of_a, &of_b);
        char* const to = share.vectors[a] + begin(t) * size;
        BestKernels().weighted_sum(share.dtype, to, to, of_a,
                                   share.vectors[a + step] + begin(t) * size, of_b,
                                   share.ends[t] - begin(t));
      }
  }
  return {};
}

}  // namespace sparkvod
