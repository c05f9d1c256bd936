// Inner products and weighted sums of two arrays, over the lanes of one instruction set. Included
// once per instruction set's file.
#pragma once

#include "native/kernels/loops.h"

namespace sparkvod {
namespace {

// Both are computed in double for every dtype: the square of a float32 may be no float32, and
// neither may the factor of a short vector beside a long one. The squares of a float64 may be no
// float64; long double, which has 15 bits of exponent, is used where that is so, since it is slow.
constexpr double kLeastSquare = 0x1p-900, kGreatestSquare = 0x1p900;
constexpr double kGreatestFactor = 0x1.fffffffffffffp1023;

using F64 = Vec<double>;
typedef float HalfF32 __attribute__((vector_size(kVectorBytes / 2)));

// The vectors of doubles that hold the lanes of one vector of a codec.
template <typename E>
constexpr int kWidth = static_cast<int>(E::kLanes * sizeof(double) / kVectorBytes);

inline void Widen(F64 v, F64* to) { *to = v; }
inline void Widen(F32 v, F64* to) {
  HalfF32 halves[2];
  __builtin_memcpy(halves, &v, sizeof(v));
  to[0] = __builtin_convertvector(halves[0], F64);
  to[1] = __builtin_convertvector(halves[1], F64);
}
inline void Widen(Pair v, F64* to) {
  Widen(v.even, to);
  Widen(v.odd, to + 2);
}

inline void Narrow(const F64* from, F64* v) { *v = *from; }
inline void Narrow(const F64* from, F32* v) {
  const HalfF32 halves[2] = {__builtin_convertvector(from[0], HalfF32),
                             __builtin_convertvector(from[1], HalfF32)};
  __builtin_memcpy(v, halves, sizeof(*v));
}
inline void Narrow(const F64* from, Pair* v) {
  Narrow(from, &v->even);
  Narrow(from + 2, &v->odd);
}

inline double SumOfLanes(const F64* vectors, int n) {
  F64 v = vectors[0];
  for (int k = 1; k < n; ++k) v += vectors[k];
  double lanes[sizeof(v) / sizeof(double)], sum = 0;
  __builtin_memcpy(lanes, &v, sizeof(v));
  for (const double x : lanes) sum += x;
  return sum;
}

template <typename E>
void ProductsOf(const void* a, const void* b, size_t n, long double* out) {
  const auto* x = static_cast<const typename E::Stored*>(a);
  const auto* y = static_cast<const typename E::Stored*>(b);
  F64 ab[kWidth<E>]{}, aa[kWidth<E>]{}, bb[kWidth<E>]{};
  for (size_t i = 0; i < n; i += E::kLanes) {
    const size_t part = n - i < E::kLanes ? n - i : E::kLanes;
    F64 v[kWidth<E>], w[kWidth<E>];
    Widen(part == E::kLanes ? E::Load(x + i) : LoadPart<E>(x + i, part), v);
    Widen(part == E::kLanes ? E::Load(y + i) : LoadPart<E>(y + i, part), w);
    for (int k = 0; k < kWidth<E>; ++k) {
      ab[k] += v[k] * w[k];
      aa[k] += v[k] * v[k];
      bb[k] += w[k] * w[k];
    }
  }
  out[0] = SumOfLanes(ab, kWidth<E>);
  out[1] = SumOfLanes(aa, kWidth<E>);
  out[2] = SumOfLanes(bb, kWidth<E>);
}

void ProductsOfDoubles(const void* a, const void* b, size_t n, long double* out) {
  ProductsOf<Float<double>>(a, b, n, out);
  const auto is_exact = [](long double square) {
    return square >= kLeastSquare && square <= kGreatestSquare;
  };
  if (is_exact(out[1]) && is_exact(out[2])) return;
  const auto* x = static_cast<const double*>(a);
  const auto* y = static_cast<const double*>(b);
  out[0] = out[1] = out[2] = 0;
  for (size_t i = 0; i < n; ++i) {
    const long double v = x[i], w = y[i];
    out[0] += v * w;
    out[1] += v * v;
    out[2] += w * w;
  }
}

template <typename E>
void WeightedSumOf(void* dst, const void* a, double of_a, const void* b, double of_b, size_t n) {
  const auto* x = static_cast<const typename E::Stored*>(a);
  const auto* y = static_cast<const typename E::Stored*>(b);
  auto* to = static_cast<typename E::Stored*>(dst);
  for (size_t i = 0; i < n; i += E::kLanes) {
    const size_t part = n - i < E::kLanes ? n - i : E::kLanes;
    F64 v[kWidth<E>], w[kWidth<E>];
    Widen(part == E::kLanes ? E::Load(x + i) : LoadPart<E>(x + i, part), v);
    Widen(part == E::kLanes ? E::Load(y + i) : LoadPart<E>(y + i, part), w);
    for (int k = 0; k < kWidth<E>; ++k) v[k] = v[k] * of_a + w[k] * of_b;
    typename E::V sum;
    Narrow(v, &sum);
    if (part == E::kLanes)
      E::Store(to + i, sum);
    else
      StorePart<E>(to + i, sum, part);
  }
}

void WeightedSumOfDoubles(void* dst, const void* a, long double of_a, const void* b,
                          long double of_b, size_t n) {
  const auto is_double = [](long double factor) {
    return factor >= -kGreatestFactor && factor <= kGreatestFactor;
  };
  if (is_double(of_a) && is_double(of_b))
    return WeightedSumOf<Float<double>>(dst, a, static_cast<double>(of_a), b,
                                        static_cast<double>(of_b), n);
  const auto* x = static_cast<const double*>(a);
  const auto* y = static_cast<const double*>(b);
  auto* to = static_cast<double*>(dst);
  for (size_t i = 0; i < n; ++i) to[i] = static_cast<double>(x[i] * of_a + y[i] * of_b);
}

void Products(DType dtype, const void* a, const void* b, size_t n, long double* out) noexcept {
  switch (dtype) {
    case DType::kFloat16:
      return ProductsOf<Float16>(a, b, n, out);
    case DType::kBFloat16:
      return ProductsOf<BFloat16>(a, b, n, out);
    case DType::kFloat32:
      return ProductsOf<Float<float>>(a, b, n, out);
    case DType::kFloat64:
      return ProductsOfDoubles(a, b, n, out);
    default:
      out[0] = out[1] = out[2] = 0;
  }
}

void WeightedSum(DType dtype, void* dst, const void* a, long double of_a, const void* b,
                 long double of_b, size_t n) noexcept {
  const auto p = static_cast<double>(of_a), q = static_cast<double>(of_b);
  switch (dtype) {
    case DType::kFloat16:
      return WeightedSumOf<Float16>(dst, a, p, b, q, n);
    case DType::kBFloat16:
      return WeightedSumOf<BFloat16>(dst, a, p, b, q, n);
    case DType::kFloat32:
      return WeightedSumOf<Float<float>>(dst, a, p, b, q, n);
    case DType::kFloat64:
      return WeightedSumOfDoubles(dst, a, of_a, b, of_b, n);
    default:
      return;
  }
}

}  // namespace
}  // namespace sparkvod
