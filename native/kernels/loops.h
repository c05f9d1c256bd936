// The loops over lanes.h, and the table of one instruction set. Included once per instruction set's
// file.
#pragma once

#include "native/kernels/lanes.h"

namespace sparkvod {
namespace {

// Vectors in flight per array: hides the latency of loads and keeps the pointer arithmetic out of
// the way.
constexpr int kUnroll = 4;

// A vector with fewer elements than lanes, the others zero: the end of an array goes through the
// same code, and so to the same bits, as its body.
template <typename E>
typename E::V LoadPart(const typename E::Stored* p, size_t n) {
  typename E::Stored lanes[E::kLanes] = {};
  __builtin_memcpy(lanes, p, n * sizeof(lanes[0]));
  return E::Load(lanes);
}

template <typename E>
void StorePart(typename E::Stored* p, typename E::V v, size_t n) {
  typename E::Stored lanes[E::kLanes];
  E::Store(lanes, v);
  __builtin_memcpy(p, lanes, n * sizeof(lanes[0]));
}

// kSrcs and kDsts are the numbers of arrays where they are known in advance, else 0.
template <typename E, typename C, int kSrcs, int kDsts>
void SumLoop(void* const* dsts, int ndst, const void* const* srcs, int nsrc, size_t n,
             const Finish& finish) {
  using Stored = typename E::Stored;
  using V = typename E::V;
  constexpr size_t kLanes = E::kLanes;
  constexpr size_t kStep = kLanes * kUnroll;
  if (kSrcs > 0) nsrc = kSrcs;
  if (kDsts > 0) ndst = kDsts;
  const Stored* fixed_srcs[kSrcs > 0 ? kSrcs : 1] = {};
  Stored* fixed_dsts[kDsts > 0 ? kDsts : 1] = {};
  for (int s = 0; s < kSrcs; ++s) fixed_srcs[s] = static_cast<const Stored*>(srcs[s]);
  for (int d = 0; d < kDsts; ++d) fixed_dsts[d] = static_cast<Stored*>(dsts[d]);
  const auto src = [&](int s) {
    return kSrcs > 0 ? fixed_srcs[s] : static_cast<const Stored*>(srcs[s]);
  };
  const auto dst = [&](int d) { return kDsts > 0 ? fixed_dsts[d] : static_cast<Stored*>(dsts[d]); };
  const typename E::Finisher finisher(finish);

  size_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    V sum[kUnroll];
    const Stored* p = src(0) + i;
#pragma GCC unroll 4
    for (int u = 0; u < kUnroll; ++u) sum[u] = E::Load(p + u * kLanes);
    for (int s = 1; s < nsrc; ++s) {
      p = src(s) + i;
#pragma GCC unroll 4
      for (int u = 0; u < kUnroll; ++u) sum[u] = C::template Of<E>(sum[u], E::Load(p + u * kLanes));
    }
    if (finisher.active) {
#pragma GCC unroll 4
      for (int u = 0; u < kUnroll; ++u) sum[u] = finisher(sum[u]);
    }
    for (int d = 0; d < ndst; ++d) {
      Stored* q = dst(d) + i;
#pragma GCC unroll 4
      for (int u = 0; u < kUnroll; ++u) E::Store(q + u * kLanes, sum[u]);
    }
  }
  for (; i < n; i += kLanes) {
    const size_t part = n - i < kLanes ? n - i : kLanes;
    V sum = LoadPart<E>(src(0) + i, part);
    for (int s = 1; s < nsrc; ++s) sum = C::template Of<E>(sum, LoadPart<E>(src(s) + i, part));
    if (finisher.active) sum = finisher(sum);
    for (int d = 0; d < ndst; ++d) StorePart<E>(dst(d) + i, sum, part);
  }
}

template <typename E>
void SumOf(void* const* dsts, int ndst, const void* const* srcs, int nsrc, size_t n,
           const Finish& finish) {
  switch (finish.combine) {
    case Combine::kMin:
      return SumLoop<E, TakingLeast, 0, 0>(dsts, ndst, srcs, nsrc, n, finish);
    case Combine::kMax:
      return SumLoop<E, TakingGreatest, 0, 0>(dsts, ndst, srcs, nsrc, n, finish);
    case Combine::kProduct:
      return SumLoop<E, Multiplying, 0, 0>(dsts, ndst, srcs, nsrc, n, finish);
    case Combine::kSum:
      break;
  }
  if (nsrc == 2 && ndst == 2) return SumLoop<E, Adding, 2, 2>(dsts, ndst, srcs, nsrc, n, finish);
  if (nsrc == 2 && ndst == 1) return SumLoop<E, Adding, 2, 1>(dsts, ndst, srcs, nsrc, n, finish);
  SumLoop<E, Adding, 0, 0>(dsts, ndst, srcs, nsrc, n, finish);
}

template <typename T>
using Int = Plain<T, IntFinisher<T>>;
template <typename T>
using Float = Plain<T, FloatFinisher<T>>;

void SumTo(DType dtype, void* const* dsts, int ndst, const void* const* srcs, int nsrc, size_t n,
           Finish finish) noexcept {
  switch (dtype) {
    case DType::kUInt8:
      return SumOf<Int<uint8_t>>(dsts, ndst, srcs, nsrc, n, finish);
    case DType::kInt8:
      return SumOf<Int<int8_t>>(dsts, ndst, srcs, nsrc, n, finish);
    case DType::kUInt16:
      return SumOf<Int<uint16_t>>(dsts, ndst, srcs, nsrc, n, finish);
    case DType::kInt16:
      return SumOf<Int<int16_t>>(dsts, ndst, srcs, nsrc, n, finish);
    case DType::kInt32:
      return SumOf<Int<int32_t>>(dsts, ndst, srcs, nsrc, n, finish);
    case DType::kInt64:
      return SumOf<Int<int64_t>>(dsts, ndst, srcs, nsrc, n, finish);
    case DType::kFloat16:
      return SumOf<Float16>(dsts, ndst, srcs, nsrc, n, finish);
    case DType::kBFloat16:
      return SumOf<BFloat16>(dsts, ndst, srcs, nsrc, n, finish);
    case DType::kFloat32:
      return SumOf<Float<float>>(dsts, ndst, srcs, nsrc, n, finish);
    case DType::kFloat64:
      return SumOf<Float<double>>(dsts, ndst, srcs, nsrc, n, finish);
    case DType::kBool:
      return SumOf<Bool>(dsts, ndst, srcs, nsrc, n, finish);
  }
}

void CopyStreaming(void* dst, const void* src, size_t nbytes) noexcept {
  constexpr size_t kLine = 64;
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
  size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  if (head > nbytes) head = nbytes;
  __builtin_memcpy(to, from, head);
  size_t i = head;
  for (; i + kLine <= nbytes; i += kLine) StreamLine(to + i, from + i);
  EndStream();
  __builtin_memcpy(to + i, from + i, nbytes - i);
}

// A sum of one source.
void Scale(DType dtype, void* dst, const void* src, size_t n, double factor) noexcept {
  SumTo(dtype, &dst, 1, &src, 1, n, Finish{factor, 1, Combine::kSum});
}

}  // namespace
}  // namespace sparkvod
