// Inner products and weighted sums of two arrays, over the lanes of one instruction set. Included
// once per instruction set's file.
#pragma once

#include "native/kernels/loops.h"

namespace sparkvod {
namespace {

// Vectors whose products are summed in the lanes' own precision before they go into a double.
constexpr size_t kBlock = 64;

template <typename T, typename V>
double SumOfLanes(V v) {
  T lanes[sizeof(V) / sizeof(T)];
  __builtin_memcpy(lanes, &v, sizeof(v));
  double sum = 0;
  for (const T x : lanes) sum += static_cast<double>(x);
  return sum;
}

// T: what the lanes compute with.
template <typename E, typename T>
void ProductsOf(const void* a, const void* b, size_t n, double* out) {
  using V = typename E::V;
  const auto* x = static_cast<const typename E::Stored*>(a);
  const auto* y = static_cast<const typename E::Stored*>(b);
  out[0] = out[1] = out[2] = 0;
  for (size_t i = 0; i < n;) {
    V ab{}, aa{}, bb{};
    for (size_t k = 0; k < kBlock && i < n; ++k, i += E::kLanes) {
      const size_t part = n - i < E::kLanes ? n - i : E::kLanes;
      const V v = part == E::kLanes ? E::Load(x + i) : LoadPart<E>(x + i, part);
      const V w = part == E::kLanes ? E::Load(y + i) : LoadPart<E>(y + i, part);
      ab += v * w;
      aa += v * v;
      bb += w * w;
    }
    out[0] += SumOfLanes<T>(ab);
    out[1] += SumOfLanes<T>(aa);
    out[2] += SumOfLanes<T>(bb);
  }
}

template <typename E, typename T>
void WeightedSumOf(void* dst, const void* a, double of_a, const void* b, double of_b, size_t n) {
  const auto* x = static_cast<const typename E::Stored*>(a);
  const auto* y = static_cast<const typename E::Stored*>(b);
  auto* to = static_cast<typename E::Stored*>(dst);
  const T p = static_cast<T>(of_a), q = static_cast<T>(of_b);
  size_t i = 0;
  for (; i + E::kLanes <= n; i += E::kLanes)
    E::Store(to + i, E::Load(x + i) * p + E::Load(y + i) * q);
  if (i < n)
    StorePart<E>(to + i, LoadPart<E>(x + i, n - i) * p + LoadPart<E>(y + i, n - i) * q, n - i);
}

void Products(DType dtype, const void* a, const void* b, size_t n, double* out) noexcept {
  switch (dtype) {
    case DType::kFloat16:
      return ProductsOf<Float16, float>(a, b, n, out);
    case DType::kBFloat16:
      return ProductsOf<BFloat16, float>(a, b, n, out);
    case DType::kFloat32:
      return ProductsOf<Float<float>, float>(a, b, n, out);
    case DType::kFloat64:
      return ProductsOf<Float<double>, double>(a, b, n, out);
    default:
      out[0] = out[1] = out[2] = 0;
  }
}

void WeightedSum(DType dtype, void* dst, const void* a, double of_a, const void* b, double of_b,
                 size_t n) noexcept {
  switch (dtype) {
    case DType::kFloat16:
      return WeightedSumOf<Float16, float>(dst, a, of_a, b, of_b, n);
    case DType::kBFloat16:
      return WeightedSumOf<BFloat16, float>(dst, a, of_a, b, of_b, n);
    case DType::kFloat32:
      return WeightedSumOf<Float<float>, float>(dst, a, of_a, b, of_b, n);
    case DType::kFloat64:
      return WeightedSumOf<Float<double>, double>(dst, a, of_a, b, of_b, n);
    default:
      return;
  }
}

}  // namespace
}  // namespace sparkvod
