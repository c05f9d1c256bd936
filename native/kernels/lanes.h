// Elements as lanes of vectors, for the files that are compiled once per instruction set.
//
// Vectors are the compiler's own (GCC and Clang): the same source becomes SSE2 or NEON, AVX2 or
// AVX-512 by the flags of the file that includes it. Everything stands in an unnamed namespace and
// nothing of the standard library's inline functions is used, so that no code compiled for a newer
// CPU can be picked by the linker for an older one.
//
// A codec says how one dtype is stored and computed with:
//   Stored, V, kLanes        the element in memory, the vector computed with, elements per vector
//   Load(p), Store(p, v)     kLanes elements from and to unaligned memory
//   Add, Least, Greatest, Multiply (a, b)    what Combine names
//   Finisher                 a Finish made ready: `active`, and the operation on a vector
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/kernels/reduce.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace sparkvod {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kWideLanes = kVectorBytes / 4;  // lanes of 32 bits

template <typename T>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kVectorBytes)));
};
template <typename T>
using Vec = typename VectorOf<T>::Type;
typedef uint16_t HalfVec __attribute__((vector_size(kVectorBytes / 2)));
using U32 = Vec<uint32_t>;
using F32 = Vec<float>;

// Bit patterns, as the compiler's casts between vectors of one size do.
inline U32 Bits(F32 v) { return (U32)v; }
inline F32 Floats(U32 v) { return (F32)v; }
inline U32 Select(U32 mask, U32 yes, U32 no) { return (mask & yes) | (~mask & no); }

// Masks: where a lane is greater, by the signed comparison that all instruction sets have.
inline U32 Greater(U32 a, int32_t b) { return (U32)((Vec<int32_t>)a > b); }

// 16 bits per lane in memory, 32 in the vector; the upper half is zero.
inline U32 LoadWide(const uint16_t* p) {
  HalfVec v;
  __builtin_memcpy(&v, p, sizeof(v));
  return __builtin_convertvector(v, U32);
}
inline void StoreNarrow(uint16_t* p, U32 v) {
  const HalfVec narrow = __builtin_convertvector(v, HalfVec);
  __builtin_memcpy(p, &narrow, sizeof(narrow));
}

// One cache line, to a place aligned to it, without first fetching that line into the cache.
#if defined(__AVX512F__)
inline void StreamLine(void* to, const void* from) {
  _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(from));
}
#elif defined(__SSE2__)
inline void StreamLine(void* to, const void* from) {
  __m128i part[4];
  __builtin_memcpy(part, from, sizeof(part));
  for (int i = 0; i < 4; ++i) _mm_stream_si128(static_cast<__m128i*>(to) + i, part[i]);
}
#else
inline void StreamLine(void* to, const void* from) { __builtin_memcpy(to, from, 64); }
#endif

// Streamed stores are not ordered with later ones, such as a flag that says that they are there,
// until this.
inline void EndStream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Truncates towards zero, saturates, and makes 0 of a NaN, where a plain conversion would be
// undefined.
template <typename T>
T FromDouble(double x) {
  constexpr bool kSigned = T(-1) < T(0);
  constexpr int kBits = 8 * sizeof(T) - (kSigned ? 1 : 0);
  constexpr double kEnd = 2.0 * double(uint64_t{1} << (kBits - 1));  // one more than the largest T
  constexpr T kMax = T((uint64_t{1} << (kBits - 1)) - 1 + (uint64_t{1} << (kBits - 1)));
  if (x >= kEnd) return kMax;
  if (kSigned ? x < -kEnd : x <= -1.0) return kSigned ? T(-kMax - 1) : T(0);
  return x == x ? T(x) : T(0);
}

template <typename F>
struct FloatFinisher {
  using V = Vec<F>;
  explicit FloatFinisher(const Finish& finish)
      : active(finish.scale != 1.0), scale(static_cast<F>(finish.scale)) {}
  V operator()(V v) const { return v * scale; }
  bool active;
  F scale;
};

template <typename T>
struct IntFinisher {
  explicit IntFinisher(const Finish& finish)
      : active(finish.divisor != 1 || finish.scale != 1.0), finish(finish) {}
  template <typename V>
  V operator()(V v) const {
    T lanes[sizeof(V) / sizeof(T)];
    __builtin_memcpy(lanes, &v, sizeof(v));
    // Up to 32 bits the quotient in double, truncated, is the exact one: it lies at least 2^-31 of
    // itself away from the next integer. That vectorises; a division of integers does not.
    if (sizeof(T) < 8) {
      const double divisor = static_cast<double>(finish.divisor);
      for (T& x : lanes) x = static_cast<T>(static_cast<int32_t>(x / divisor));
    } else {
      for (T& x : lanes) x = static_cast<T>(x / finish.divisor);
    }
    if (finish.scale != 1.0) {
      for (T& x : lanes) x = FromDouble<T>(static_cast<double>(x) * finish.scale);
    }
    __builtin_memcpy(&v, lanes, sizeof(v));
    return v;
  }
  bool active;
  Finish finish;
};

struct NoFinisher {
  explicit NoFinisher(const Finish&) {}
  template <typename V>
  V operator()(V v) const {
    return v;
  }
  static constexpr bool active = false;
};

// Integers are added as unsigned ones, which wrap.
template <typename T>
struct Unsigned {
  using Type = T;
};
template <>
struct Unsigned<int8_t> {
  using Type = uint8_t;
};
template <>
struct Unsigned<int16_t> {
  using Type = uint16_t;
};
template <>
struct Unsigned<int32_t> {
  using Type = uint32_t;
};
template <>
struct Unsigned<int64_t> {
  using Type = uint64_t;
};

template <typename T, typename FinisherOfT>
struct Plain {
  using Stored = T;
  using V = Vec<typename Unsigned<T>::Type>;
  using Finisher = FinisherOfT;
  static constexpr int kLanes = kVectorBytes / sizeof(T);
  static V Load(const T* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
  }
  static void Store(T* p, V v) { __builtin_memcpy(p, &v, sizeof(v)); }
  static V Add(V a, V b) { return a + b; }
  static V Multiply(V a, V b) { return a * b; }
  // Compared as what they are; a lane that holds a NaN is unequal to itself and is kept.
  static V Least(V a, V b) {
    const Vec<T> x = (Vec<T>)a, y = (Vec<T>)b;
    return (V)(((x < y) | (x != x)) ? x : y);
  }
  static V Greatest(V a, V b) {
    const Vec<T> x = (Vec<T>)a, y = (Vec<T>)b;
    return (V)(((x > y) | (x != x)) ? x : y);
  }
};

struct Bool : Plain<uint8_t, NoFinisher> {
  static V Add(V a, V b) { return (V)((a | b) != 0) & 1; }
  static V Multiply(V a, V b) { return (V)((a != 0) & (b != 0)) & 1; }
  static V Least(V a, V b) { return Multiply(a, b); }
  static V Greatest(V a, V b) { return Add(a, b); }
};

// Half precision is computed with as float32.
struct Wide {
  using Stored = uint16_t;
  using V = F32;
  using Finisher = FloatFinisher<float>;
  using Floating = Plain<float, Finisher>;
  static constexpr int kLanes = kWideLanes;
  static V Add(V a, V b) { return a + b; }
  static V Multiply(V a, V b) { return a * b; }
  static V Least(V a, V b) { return Floating::Least(a, b); }
  static V Greatest(V a, V b) { return Floating::Greatest(a, b); }
};

// Elements of even and of odd places apart: a word of 32 bits holds one of each, so that widening
// and narrowing them takes no shuffle.
struct Pair {
  F32 even, odd;
  Pair& operator+=(Pair o) { return *this = {even + o.even, odd + o.odd}; }
};
inline Pair operator+(Pair a, Pair b) { return {a.even + b.even, a.odd + b.odd}; }
inline Pair operator*(Pair a, Pair b) { return {a.even * b.even, a.odd * b.odd}; }
inline Pair operator*(Pair a, float b) { return {a.even * b, a.odd * b}; }

struct BFloat16 {
  using Stored = uint16_t;
  using V = Pair;
  using Floating = Plain<float, FloatFinisher<float>>;
  struct Finisher : FloatFinisher<float> {
    using FloatFinisher::FloatFinisher;
    Pair operator()(Pair v) const { return v * scale; }
  };
  static constexpr int kLanes = 2 * kWideLanes;
  static V Load(const uint16_t* p) {
    U32 words;
    __builtin_memcpy(&words, p, sizeof(words));
    return {Floats(words << 16), Floats(words & 0xffff0000)};
  }
  static void Store(uint16_t* p, V v) {
    U32 even = Rounded(v.even), odd = Rounded(v.odd);
#if defined(__AVX512F__)
    if (__builtin_expect(_mm512_cmp_ps_mask((__m512)v.even, (__m512)v.odd, _CMP_UNORD_Q) != 0, 0))
#endif
    {
      even = Quiet(v.even, even);
      odd = Quiet(v.odd, odd);
    }
    const U32 words = even >> 16 | (odd & 0xffff0000);
    __builtin_memcpy(p, &words, sizeof(words));
  }
  static V Add(V a, V b) { return a + b; }
  static V Multiply(V a, V b) { return a * b; }
  static V Least(V a, V b) {
    return {Floating::Least(a.even, b.even), Floating::Least(a.odd, b.odd)};
  }
  static V Greatest(V a, V b) {
    return {Floating::Greatest(a.even, b.even), Floating::Greatest(a.odd, b.odd)};
  }

 private:
  // Nearest even, in the upper half: half a unit less one, plus one where the kept part is odd,
  // carries into it. (The CPU's own conversion, AVX512-BF16, takes denormals for zero, so its bits
  // would differ.)
  static U32 Rounded(F32 v) { return Bits(v) + 0x7fff + ((Bits(v) >> 16) & 1); }
  // A NaN must not be carried into infinity: it keeps its upper bits and is made quiet.
  static U32 Quiet(F32 v, U32 rounded) {
    return (U32)((v != v) ? (Vec<int32_t>)(Bits(v) | 0x400000) : (Vec<int32_t>)rounded);
  }
};

struct Float16 : Wide {
#if defined(__AVX512F__)
  static V Load(const uint16_t* p) {
    return (V)_mm512_maskz_cvtph_ps(-1, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void Store(uint16_t* p, V v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_maskz_cvtps_ph(-1, (__m512)v, _MM_FROUND_TO_NEAREST_INT));
  }
#elif defined(__F16C__) && defined(__AVX2__)
  static V Load(const uint16_t* p) {
    return (V)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void Store(uint16_t* p, V v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
  }
#else
  static V Load(const uint16_t* p) {
    const U32 half = LoadWide(p);
    const U32 sign = (half & 0x8000) << 16;
    const U32 magnitude = half & 0x7fff;
    // The exponent's bias grows by 112; that of infinities and NaNs goes on to 255, and NaNs become
    // quiet.
    const U32 special = Greater(magnitude, 0x7bff) & (112u << 23);
    const U32 quiet = Greater(magnitude, 0x7c00) & 0x400000;
    const U32 normal = ((magnitude << 13) + (112u << 23) + special) | quiet;
    // Denormals are multiples of 2^-24.
    typedef Vec<int32_t> I32;
    const U32 denormal = Bits(__builtin_convertvector((I32)magnitude, F32) * 0x1p-24f);
    return Floats(sign | Select(Greater(magnitude, 0x3ff), normal, denormal));
  }
  static void Store(uint16_t* p, V v) {
    const U32 bits = Bits(v);
    const U32 sign = (bits >> 16) & 0x8000;
    const U32 magnitude = bits & 0x7fffffff;
    const U32 normal = ((magnitude + 0xfff + ((magnitude >> 13) & 1)) >> 13) - (112u << 10);
    // Below 2^-14 the unit is 2^-24, which is the last bit of floats in [0.5, 1): adding 0.5 rounds
    // to it.
    const U32 denormal = Bits(Floats(magnitude) + 0.5f) - 0x3f000000;
    const U32 nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
    const U32 infinity = U32{} + 0x7c00;
    U32 half = Select(Greater(magnitude, 0x387fffff), normal, denormal);
    half = Select(Greater(magnitude, 0x477fefff), infinity, half);  // from 65520 on
    half = Select(Greater(magnitude, 0x7f800000), nan, half);
    StoreNarrow(p, sign | half);
  }
#endif
};

// Combine, as types that loops are made for.
struct Adding {
  template <typename E>
  static typename E::V Of(typename E::V a, typename E::V b) {
    return E::Add(a, b);
  }
};
struct Multiplying {
  template <typename E>
  static typename E::V Of(typename E::V a, typename E::V b) {
    return E::Multiply(a, b);
  }
};
struct TakingLeast {
  template <typename E>
  static typename E::V Of(typename E::V a, typename E::V b) {
    return E::Least(a, b);
  }
};
struct TakingGreatest {
  template <typename E>
  static typename E::V Of(typename E::V a, typename E::V b) {
    return E::Greatest(a, b);
  }
};

}  // namespace
}  // namespace sparkvod
