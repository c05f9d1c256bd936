// Every instruction set that this CPU has against sums written out in double or 64-bit integers,
// and, bit for bit, against the portable set.
#include "native/kernels/reduce.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "tests/native/check.h"

namespace sparkvod {
namespace {

using Bytes = std::vector<uint8_t>;

// One below, at and above the vectors and unrolled steps of all sets, for elements of 1 to 8 bytes.
const std::vector<size_t> kSizes = {0,  1,  2,   3,   7,   8,   15,  16,  17,  31,   33,  63,
                                    64, 65, 127, 129, 255, 256, 257, 511, 513, 1000, 4099};

// The values of halves, straight from their definition.
double HalfValue(uint16_t bits, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const double fraction = std::ldexp(bits & ((1 << mantissa_bits) - 1), -mantissa_bits);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  double value;
  if (exponent == (1 << exponent_bits) - 1) {
    value = fraction == 0 ? std::numeric_limits<double>::infinity()
                          : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    value = std::ldexp(fraction, 1 - bias);
  } else {
    value = std::ldexp(1 + fraction, exponent - bias);
  }
  return bits & 0x8000 ? -value : value;
}

int ExponentBits(DType dtype) { return dtype == DType::kFloat16 ? 5 : 8; }

// Random bits; of a floating dtype every pattern but NaN (whose payloads are tested apart),
// infinities among them.
Bytes Random(DType dtype, size_t n, uint32_t seed) {
  std::mt19937 draw(seed);
  Bytes bytes(n * SizeOf(dtype));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(draw());
  for (size_t i = 0; i < n; ++i) {
    uint8_t* p = bytes.data() + i * SizeOf(dtype);
    if (dtype == DType::kBool) *p &= 1;
    if (dtype == DType::kFloat32 || dtype == DType::kFloat64) {
      const double x = static_cast<int32_t>(draw()) / 65536.0;
      const float f = static_cast<float>(x);
      dtype == DType::kFloat32 ? std::memcpy(p, &f, 4) : std::memcpy(p, &x, 8);
    } else if (IsFloating(dtype)) {
      uint16_t h;
      std::memcpy(&h, p, 2);
      if (std::isnan(HalfValue(h, ExponentBits(dtype)))) h = 0x3c00;
      std::memcpy(p, &h, 2);
    }
  }
  return bytes;
}

Bytes SumWith(const Kernels& kernels, DType dtype, const std::vector<Bytes>& srcs, size_t n,
              Finish finish = {}, int ndst = 1) {
  std::vector<const void*> from;
  for (const Bytes& src : srcs) from.push_back(src.data());
  std::vector<Bytes> dsts(ndst, Bytes(n * SizeOf(dtype) + 1, 0xa5));
  std::vector<void*> to;
  for (Bytes& dst : dsts) to.push_back(dst.data());
  kernels.sum_to(dtype, to.data(), ndst, from.data(), static_cast<int>(from.size()), n, finish);
  for (Bytes& dst : dsts) {
    EXPECT_EQ(int{dst.back()}, 0xa5);  // nothing is written beyond the end
    dst.pop_back();
    EXPECT(dst == dsts[0]);
  }
  return dsts[0];
}

std::string Where(const Kernels& kernels, DType dtype, size_t n, size_t nsrc) {
  return std::string(NameOf(kernels.isa)) + " " + NameOf(dtype) + " n=" + std::to_string(n) +
         " sources=" + std::to_string(nsrc);
}

template <typename T>
T At(const Bytes& bytes, size_t i) {
  T x;
  std::memcpy(&x, bytes.data() + i * sizeof(T), sizeof(T));
  return x;
}

// The sums of plain types, in the order that is promised.
template <typename T, typename Sum>
void CheckPlain(DType dtype, const Kernels& kernels) {
  for (size_t n : kSizes) {
    for (size_t nsrc : {1, 2, 3, 8}) {
      std::vector<Bytes> srcs;
      for (size_t s = 0; s < nsrc; ++s) srcs.push_back(Random(dtype, n, 100 * n + s));
      const Bytes found = SumWith(kernels, dtype, srcs, n, {}, nsrc == 3 ? 3 : 1);
      bool equal = true;
      for (size_t i = 0; i < n; ++i) {
        Sum sum = static_cast<Sum>(At<T>(srcs[0], i));
        for (size_t s = 1; s < nsrc; ++s)
          sum = static_cast<Sum>(sum + static_cast<Sum>(At<T>(srcs[s], i)));
        equal = equal && At<T>(found, i) == static_cast<T>(sum);
      }
      if (!equal) check::Fail(__FILE__, __LINE__, Where(kernels, dtype, n, nsrc));
    }
  }
}

// Minima, maxima and products by the same types' own operators.
template <typename T>
void CheckCombined(DType dtype, const Kernels& kernels) {
  for (size_t n : kSizes) {
    for (size_t nsrc : {1, 2, 3}) {
      std::vector<Bytes> srcs;
      for (size_t s = 0; s < nsrc; ++s) srcs.push_back(Random(dtype, n, 100 * n + s + 50));
      for (Combine combine : {Combine::kMin, Combine::kMax, Combine::kProduct}) {
        const Bytes found = SumWith(kernels, dtype, srcs, n, {1.0, 1, combine});
        bool equal = true;
        for (size_t i = 0; i < n; ++i) {
          T result = At<T>(srcs[0], i);
          for (size_t s = 1; s < nsrc; ++s) {
            const T x = At<T>(srcs[s], i);
            if (combine == Combine::kMin)
              result = x < result ? x : result;
            else if (combine == Combine::kMax)
              result = x > result ? x : result;
            else if constexpr (std::is_integral_v<T>)
              result = static_cast<T>(static_cast<uint64_t>(result) * static_cast<uint64_t>(x));
            else
              result = result * x;
          }
          equal = equal && At<T>(found, i) == result;
        }
        if (!equal) check::Fail(__FILE__, __LINE__, Where(kernels, dtype, n, nsrc));
      }
    }
  }
}

TEST(KernelsTakeMinimaMaximaAndProducts) {
  for (const Kernels* kernels : AllKernels()) {
    CheckCombined<float>(DType::kFloat32, *kernels);
    CheckCombined<double>(DType::kFloat64, *kernels);
    CheckCombined<int8_t>(DType::kInt8, *kernels);
    CheckCombined<uint8_t>(DType::kUInt8, *kernels);
    CheckCombined<int16_t>(DType::kInt16, *kernels);
    CheckCombined<uint16_t>(DType::kUInt16, *kernels);
    CheckCombined<int32_t>(DType::kInt32, *kernels);
    CheckCombined<int64_t>(DType::kInt64, *kernels);
    CheckCombined<bool>(DType::kBool, *kernels);
  }
}

// A NaN stays, whichever source holds it.
TEST(KernelsKeepNaNsInMinimaAndMaxima) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Kernels* kernels : AllKernels()) {
    for (Combine combine : {Combine::kMin, Combine::kMax}) {
      const float a[3] = {nan, 1, 2}, b[3] = {1, nan, 3};
      float found[3];
      const void* srcs[2] = {a, b};
      void* dst = found;
      kernels->sum_to(DType::kFloat32, &dst, 1, srcs, 2, 3, {1.0, 1, combine});
      EXPECT(std::isnan(found[0]));
      EXPECT(std::isnan(found[1]));
      EXPECT_EQ(found[2], combine == Combine::kMin ? 2.0f : 3.0f);
    }
  }
}

TEST(KernelsSumPlainTypes) {
  for (const Kernels* kernels : AllKernels()) {
    CheckPlain<float, float>(DType::kFloat32, *kernels);
    CheckPlain<double, double>(DType::kFloat64, *kernels);
    CheckPlain<int8_t, uint8_t>(DType::kInt8, *kernels);
    CheckPlain<uint8_t, uint8_t>(DType::kUInt8, *kernels);
    CheckPlain<int16_t, uint16_t>(DType::kInt16, *kernels);
    CheckPlain<uint16_t, uint16_t>(DType::kUInt16, *kernels);
    CheckPlain<int32_t, uint32_t>(DType::kInt32, *kernels);
    CheckPlain<int64_t, uint64_t>(DType::kInt64, *kernels);
    CheckPlain<bool, bool>(DType::kBool, *kernels);
  }
}

TEST(KernelsAgreeBitForBit) {
  const Kernels& portable = *KernelsFor(Isa::kPortable);
  for (const Kernels* kernels : AllKernels()) {
    for (int code = 0; code < kDTypeCount; ++code) {
      const auto dtype = static_cast<DType>(code);
      for (size_t n : {size_t{1}, size_t{67}, size_t{5000}}) {
        for (size_t nsrc : {2, 5}) {
          std::vector<Bytes> srcs;
          for (size_t s = 0; s < nsrc; ++s) srcs.push_back(Random(dtype, n, 7 * s + 1));
          for (const Finish& finish :
               {Finish{}, Finish{1.0 / nsrc, static_cast<int64_t>(nsrc)}, Finish{0.3, 1},
                Finish{1.0, 1, Combine::kMin}, Finish{1.0, 1, Combine::kMax},
                Finish{0.3, 1, Combine::kProduct}})
            if (SumWith(*kernels, dtype, srcs, n, finish) !=
                SumWith(portable, dtype, srcs, n, finish))
              check::Fail(__FILE__, __LINE__, Where(*kernels, dtype, n, nsrc));
        }
      }
    }
  }
}

// All 65,536 halves: widened and narrowed again (a sum with one source) they are the same, NaNs
// made quiet.
TEST(KernelsKeepEveryHalf) {
  Bytes all(65536 * 2);
  for (uint32_t i = 0; i < 65536; ++i) {
    const auto half = static_cast<uint16_t>(i);
    std::memcpy(&all[2 * i], &half, 2);
  }
  for (const Kernels* kernels : AllKernels()) {
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      const Bytes found = SumWith(*kernels, dtype, {all}, 65536);
      int wrong = 0;
      for (uint32_t i = 0; i < 65536; ++i) {
        const bool nan = std::isnan(HalfValue(static_cast<uint16_t>(i), ExponentBits(dtype)));
        const uint16_t quiet = dtype == DType::kFloat16 ? 0x200 : 0x40;
        wrong += At<uint16_t>(found, i) != static_cast<uint16_t>(nan ? i | quiet : i);
      }
      if (wrong != 0) check::Fail(__FILE__, __LINE__, Where(*kernels, dtype, wrong, 1));
    }
  }
}

// Sums of two halves are exact in double; the result must be the nearest half, the even one of two.
TEST(KernelsRoundHalvesToNearestEven) {
  const size_t n = 200000;
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const int bits = ExponentBits(dtype);
    std::mt19937 draw(5);
    Bytes a = Random(dtype, n, 1), b = Random(dtype, n, 2);
    // Exponents close to each other, where sums round; the last eighth stays as it is.
    for (size_t i = 0; i < n - n / 8; ++i) {
      const int shift = 15 - bits;
      uint16_t x = At<uint16_t>(a, i), y = At<uint16_t>(b, i);
      const int top = (1 << bits) - 2;
      const int exponent = std::min(top, std::max(0, ((x >> shift) & ((1 << bits) - 1)) -
                                                         static_cast<int>(draw() % (shift + 3))));
      y = static_cast<uint16_t>((y & (0x8000 | ((1 << shift) - 1))) | exponent << shift);
      std::memcpy(&b[2 * i], &y, 2);
    }
    for (const Kernels* kernels : AllKernels()) {
      const Bytes found = SumWith(*kernels, dtype, {a, b}, n);
      int wrong = 0;
      for (size_t i = 0; i < n; ++i) {
        const auto x = static_cast<float>(HalfValue(At<uint16_t>(a, i), bits));
        const auto y = static_cast<float>(HalfValue(At<uint16_t>(b, i), bits));
        const double exact = x + y;  // what float32 makes of it is what is rounded
        const uint16_t got = At<uint16_t>(found, i);
        const double value = HalfValue(got, bits);
        if (std::isnan(exact) || std::isnan(value)) {
          wrong += std::isnan(exact) != std::isnan(value);
          continue;
        }
        if (exact == value) continue;
        // The neighbours must be farther, or as far and odd. Beyond the largest half stands the
        // next power of two.
        for (int step : {-1, 1}) {
          const auto neighbour = static_cast<uint16_t>(got + step);
          if ((neighbour ^ got) & 0x8000) continue;  // below zero's magnitude: the other sign
          double other = HalfValue(neighbour, bits), mine = value;
          const int bias = (1 << (bits - 1)) - 1;
          const double beyond = std::copysign(std::ldexp(1.0, bias + 1), exact);
          if (std::isinf(mine)) mine = beyond;
          if (std::isinf(other)) other = beyond;
          if (std::isnan(other)) continue;
          const double here = std::fabs(exact - mine), there = std::fabs(exact - other);
          wrong += here > there || (here == there && (got & 1));
        }
      }
      if (wrong != 0) check::Fail(__FILE__, __LINE__, Where(*kernels, dtype, wrong, 2));
    }
  }
}

TEST(KernelsWriteOverTheirSources) {
  for (const Kernels* kernels : AllKernels()) {
    for (int code = 0; code < kDTypeCount; ++code) {
      const auto dtype = static_cast<DType>(code);
      for (int ranks : {2, 3}) {
        const size_t n = 1031;
        std::vector<Bytes> srcs;
        for (int r = 0; r < ranks; ++r) srcs.push_back(Random(dtype, n, 31 + r));
        const Bytes expected = SumWith(*kernels, dtype, srcs, n);
        std::vector<void*> both;
        for (Bytes& src : srcs) both.push_back(src.data());
        const std::vector<const void*> from(both.begin(), both.end());
        kernels->sum_to(dtype, both.data(), ranks, from.data(), ranks, n, {});
        for (const Bytes& src : srcs)
          if (src != expected) check::Fail(__FILE__, __LINE__, Where(*kernels, dtype, n, ranks));
      }
    }
  }
}

TEST(KernelsTakeUnalignedArrays) {
  for (const Kernels* kernels : AllKernels()) {
    for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kInt64}) {
      const size_t n = 515, bytes = n * SizeOf(dtype);
      const Bytes a = Random(dtype, n, 3), b = Random(dtype, n, 4);
      const Bytes expected = SumWith(*kernels, dtype, {a, b}, n);
      for (size_t shift : {1, 3, 31}) {
        Bytes x(bytes + 64), y(bytes + 64), sum(bytes + 64);
        std::memcpy(&x[shift], a.data(), bytes);
        std::memcpy(&y[shift + 1], b.data(), bytes);
        kernels->Add(dtype, &sum[shift + 2], &x[shift], &y[shift + 1], n);
        EXPECT_EQ(std::memcmp(&sum[shift + 2], expected.data(), bytes), 0);
      }
    }
  }
}

TEST(KernelsAverage) {
  for (const Kernels* kernels : AllKernels()) {
    for (size_t n : {5, 100}) {
      std::vector<Bytes> ints(3, Bytes(4 * n)), longs(3, Bytes(8 * n)), floats(3, Bytes(4 * n));
      for (int s = 0; s < 3; ++s) {
        for (size_t i = 0; i < n; ++i) {
          const auto small = static_cast<int32_t>(i % 2 ? i : -i) - s;
          const int64_t large = (int64_t{1} << 60) / (s + 3) * (i % 2 ? 1 : -1);
          const auto real = static_cast<float>(i) + 0.5f * s;
          std::memcpy(&ints[s][4 * i], &small, 4);
          std::memcpy(&longs[s][8 * i], &large, 8);
          std::memcpy(&floats[s][4 * i], &real, 4);
        }
      }
      const Finish average{1.0f / 3, 3};
      const Bytes int_means = SumWith(*kernels, DType::kInt32, ints, n, {1.0, 3});
      const Bytes long_means = SumWith(*kernels, DType::kInt64, longs, n, {1.0, 3});
      const Bytes means = SumWith(*kernels, DType::kFloat32, floats, n, average);
      for (size_t i = 0; i < n; ++i) {
        int64_t int_sum = 0, long_sum = 0;
        float sum = 0;
        for (int s = 0; s < 3; ++s) {
          int_sum += At<int32_t>(ints[s], i);
          long_sum += At<int64_t>(longs[s], i);
          sum += At<float>(floats[s], i);
        }
        EXPECT_EQ(At<int32_t>(int_means, i), int_sum / 3);
        EXPECT_EQ(At<int64_t>(long_means, i), long_sum / 3);
        EXPECT_EQ(At<float>(means, i), sum * (1.0f / 3));
      }
    }
  }
}

template <typename T>
T ScaledOnce(const Kernels& kernels, DType dtype, T x, double factor) {
  T y{};
  kernels.scale(dtype, &y, &x, 1, factor);
  return y;
}

TEST(KernelsScale) {
  for (const Kernels* kernels : AllKernels()) {
    EXPECT_EQ(ScaledOnce<float>(*kernels, DType::kFloat32, 3.0f, 0.25), 0.75f);
    EXPECT_EQ(ScaledOnce<double>(*kernels, DType::kFloat64, 3.0, 1.0 / 3), 3.0 * (1.0 / 3));
    EXPECT_EQ(ScaledOnce<uint16_t>(*kernels, DType::kFloat16, 0x3c00, 0.5), 0x3800);
    EXPECT_EQ(ScaledOnce<uint16_t>(*kernels, DType::kBFloat16, 0x3f80, 2.0), 0x4000);
    EXPECT_EQ(ScaledOnce<int32_t>(*kernels, DType::kInt32, -7, 0.5), -3);
    EXPECT_EQ(ScaledOnce<int64_t>(*kernels, DType::kInt64, 7, -0.5), -3);
    EXPECT_EQ(ScaledOnce<int32_t>(*kernels, DType::kInt32, 1 << 30, 4.0), INT32_MAX);
    EXPECT_EQ(ScaledOnce<int32_t>(*kernels, DType::kInt32, 1 << 30, -4.0), INT32_MIN);
    EXPECT_EQ(ScaledOnce<int64_t>(*kernels, DType::kInt64, int64_t{1} << 62, 4.0), INT64_MAX);
    EXPECT_EQ(ScaledOnce<int64_t>(*kernels, DType::kInt64, int64_t{1} << 62, -4.0), INT64_MIN);
    EXPECT_EQ(int{ScaledOnce<uint8_t>(*kernels, DType::kUInt8, 200, 2.0)}, 255);
    EXPECT_EQ(int{ScaledOnce<uint8_t>(*kernels, DType::kUInt8, 200, -1.0)}, 0);
    EXPECT_EQ(int{ScaledOnce<uint8_t>(*kernels, DType::kBool, 1, 0.5)}, 1);
    EXPECT_EQ(ScaledOnce<int32_t>(*kernels, DType::kInt32, 5, std::nan("")), 0);
  }
}

TEST(KernelsCopyPastTheCaches) {
  const Bytes from = Random(DType::kUInt8, 1000, 9);
  for (const Kernels* kernels : AllKernels()) {
    for (size_t n : {0, 1, 63, 64, 65, 128, 700}) {
      for (size_t shift : {0, 1, 33}) {
        Bytes to(1000, 0xee);
        kernels->copy_streaming(&to[shift], &from[2 * shift], n);
        EXPECT_EQ(std::memcmp(&to[shift], &from[2 * shift], n), 0);
        EXPECT_EQ(int{to[shift + n]}, 0xee);
      }
    }
  }
}

TEST(KernelsAreChosenOnce) {
  EXPECT(&BestKernels() == &BestKernels());
  EXPECT(&BestKernels() == AllKernels().back());
  EXPECT(KernelsFor(Isa::kPortable) == AllKernels().front());
}

}  // namespace
}  // namespace sparkvod
