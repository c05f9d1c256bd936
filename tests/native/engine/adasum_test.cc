// Adasum: the tree written out in long double, for any number of ranks, several tensors, every
// floating dtype and magnitude.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "native/kernels/reduce.h"
#include "tests/native/world.h"

namespace sparkvod {
namespace {

using namespace check;  // NOLINT: a test of what check's worlds run

using Vector = std::vector<long double>;

Vector Combined(const Vector& a, const Vector& b) {
  long double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  Vector c(a.size());
  for (size_t i = 0; i < a.size(); ++i)
    c[i] = a[i] * (aa > 0 ? 1 - ab / (2 * aa) : 1) + b[i] * (bb > 0 ? 1 - ab / (2 * bb) : 1);
  return c;
}

// What each rank's numbers are multiplied by: the powers of two of even and of odd ranks.
struct Scale {
  int even = 0, odd = 0;
  long double Of(int rank) const { return std::ldexp(1.0L, rank % 2 == 0 ? even : odd); }
  long double Greatest() const { return std::ldexp(1.0L, std::max(even, odd)); }
};

// Small whole numbers and halves of them, exact in every dtype.
double Term(int rank, size_t tensor, size_t i) {
  if (tensor == 1 && rank == 1) return 0;  // a vector without a direction
  return static_cast<double>((i * 7 + static_cast<size_t>(rank) * (5 + i % 3) + tensor) % 17) *
             0.5 -
         3;
}

Vector Expected(int size, size_t tensor, size_t count, const Scale& scale) {
  std::vector<Vector> left;
  for (int r = 0; r < size; ++r) {
    left.emplace_back(count);
    for (size_t i = 0; i < count; ++i) left.back()[i] = Term(r, tensor, i) * scale.Of(r);
  }
  while (left.size() > 1) {
    std::vector<Vector> next;
    for (size_t i = 0; i < left.size(); i += 2)
      next.push_back(i + 1 < left.size() ? Combined(left[i], left[i + 1]) : left[i]);
    left.swap(next);
  }
  return left[0];
}

std::vector<char> Encoded(DType dtype, const Vector& values) {
  std::vector<char> bytes(values.size() * SizeOf(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    const auto f = static_cast<float>(values[i]);
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    uint16_t half = static_cast<uint16_t>(bits >> 16);
    if (dtype == DType::kFloat16)
      half = values[i] == 0 ? 0
                            : static_cast<uint16_t>(((bits >> 16) & 0x8000) |
                                                    (((bits & 0x7fffffff) >> 13) - (112u << 10)));
    char* const to = bytes.data() + i * SizeOf(dtype);
    const auto d = static_cast<double>(values[i]);
    if (dtype == DType::kFloat64)
      std::memcpy(to, &d, 8);
    else if (dtype == DType::kFloat32)
      std::memcpy(to, &f, 4);
    else
      std::memcpy(to, &half, 2);
  }
  return bytes;
}

double Decoded(DType dtype, const char* from) {
  if (dtype == DType::kFloat64) {
    double d;
    std::memcpy(&d, from, 8);
    return d;
  }
  float f;
  if (dtype == DType::kFloat32) {
    std::memcpy(&f, from, 4);
    return f;
  }
  uint16_t half;
  std::memcpy(&half, from, 2);
  if (dtype == DType::kBFloat16) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  const double magnitude = (half >> 10 & 31) == 0
                               ? std::ldexp(half & 1023, -24)
                               : std::ldexp(1024 + (half & 1023), (half >> 10 & 31) - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}

std::string Text(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%.17g", number);
  return text;
}

void CheckAdasum(Engine& engine, DType dtype, const std::vector<size_t>& counts,
                 bool in_engine = false, const Scale& scale = {}) {
  const int rank = engine.topology().rank, size = engine.topology().size;
  Request request;
  request.name = std::string(NameOf(dtype)) + std::to_string(counts[0]) + "x" +
                 std::to_string(scale.even) + "," + std::to_string(scale.odd);
  request.op = ReduceOp::kAdasum;
  std::vector<std::vector<char>> data;
  for (size_t t = 0; t < counts.size(); ++t) {
    Vector mine(counts[t]);
    for (size_t i = 0; i < counts[t]; ++i) mine[i] = Term(rank, t, i) * scale.Of(rank);
    data.push_back(Encoded(dtype, mine));
    request.entries.push_back({dtype, {static_cast<int64_t>(counts[t])}});
  }
  std::vector<Part> parts;
  std::vector<std::shared_ptr<Memory>> memory(counts.size());
  for (size_t t = 0; t < counts.size(); ++t) {
    char* in = data[t].data();
    if (in_engine) {
      EXPECT(engine.Allocate(data[t].size(), &memory[t]).ok());
      in = memory[t]->data();
      std::copy(data[t].begin(), data[t].end(), in);
    }
    parts.push_back({in, in, counts[t]});
  }
  EXPECT_EQ(Run(engine, request, parts).Report(), "ok");
  for (size_t t = 0; t < counts.size() && in_engine; ++t)
    std::copy_n(memory[t]->data(), data[t].size(), data[t].begin());
  const double close = dtype == DType::kFloat64   ? 1e-12
                       : dtype == DType::kFloat32 ? 1e-4
                       : dtype == DType::kFloat16 ? 0.03
                                                  : 0.2;
  for (size_t t = 0; t < counts.size(); ++t) {
    const Vector expected = Expected(size, t, counts[t], scale);
    for (size_t i = 0; i < counts[t]; ++i) {
      const double found = Decoded(dtype, data[t].data() + i * SizeOf(dtype));
      // False for a NaN.
      if (std::abs(found - expected[i]) <= close * scale.Greatest()) continue;
      return Fail(__FILE__, __LINE__,
                  request.name + ": tensor " + std::to_string(t) + ", element " +
                      std::to_string(i) + " is " + Text(found) + ", " +
                      Text(static_cast<double>(expected[i])) + " was expected");
    }
  }
}

TEST(AdasumOfAnyNumberOfRanks) {
  for (const Kind& kind : Kinds())
    for (int size : {1, 2, 3, 5, 8})
      RunWorld(kind, size, [size](Engine& engine, int) {
        for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
          if (PathsOnly() && size > 3 && dtype != DType::kFloat32) continue;
          CheckAdasum(engine, dtype, {1, 40, 3});
          CheckAdasum(engine, dtype, {7003, 500, 0, 1});
          if (Full() || size == 3) CheckAdasum(engine, dtype, {1003, 7, 0, 1}, true);
        }
        if (Full() || size == 2 || (size == 3 && !PathsOnly()))
          CheckAdasum(engine, DType::kFloat32, {300001});
      });
}

// Squares of these overflow or vanish in the dtype, and those of float64 in double too.
TEST(AdasumOfAnyMagnitude) {
  for (const Kind& kind : Kinds())
    for (int size : {2, 3}) {
      if (PathsOnly() && size != 3) continue;
      RunWorld(kind, size, [](Engine& engine, int) {
        const std::vector<size_t> counts = {1, 40, 3, 0, 1003};
        for (DType dtype : {DType::kFloat32, DType::kBFloat16})
          for (const Scale& scale :
               {Scale{-100, -100}, Scale{66, 66}, Scale{124, 124}, Scale{-100, 120}, Scale{66, 0}})
            CheckAdasum(engine, dtype, counts, false, scale);
        for (const Scale& scale : {Scale{-1000, -1000}, Scale{1020, 1020}, Scale{-1000, 1000},
                                   Scale{0, -700}, Scale{600, 0}})
          CheckAdasum(engine, DType::kFloat64, counts, false, scale);
        for (const Scale& scale : {Scale{-10, -10}, Scale{12, 12}, Scale{-10, 12}})
          CheckAdasum(engine, DType::kFloat16, counts, false, scale);
      });
    }
}

TEST(AdasumOfSixtyFourRanks) {
  if (!Full()) return;
  RunWorld(kInproc, 64, [](Engine& engine, int) {
    for (const bool in_engine : {false, true})
      for (DType dtype : {DType::kFloat32, DType::kFloat64})
        CheckAdasum(engine, dtype, {1, 40, 3, 0, 1003}, in_engine);
  });
}

TEST(AdasumOverSeveralHosts) {
  for (const std::string layout : {"aabb", "aab"}) {
    WorldOptions options;
    for (const char host : layout) options.hosts.emplace_back(1, host);
    RunWorld(
        kInproc, static_cast<int>(layout.size()),
        [](Engine& engine, int) {
          CheckAdasum(engine, DType::kFloat32, {7003, 500, 0, 1});
          CheckAdasum(engine, DType::kFloat16, {40});
          CheckAdasum(engine, DType::kFloat32, {40, 7003}, false, {-100, -100});
          CheckAdasum(engine, DType::kFloat64, {40, 7003}, false, {1020, -1000});
        },
        options);
  }
}

TEST(KernelsMultiplyPairs) {
  const Vector a = {1, -2, 3.5}, b = {4, 5, -0.5};
  for (const Kernels* kernels : AllKernels())
    for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16})
      for (size_t n : {0, 1, 3, 67, 5000}) {
        Vector x(n), y(n);
        long double expected[3] = {0, 0, 0}, found[3];
        for (size_t i = 0; i < n; ++i) {
          x[i] = a[i % 3];
          y[i] = b[i % 3];
          expected[0] += x[i] * y[i];
          expected[1] += x[i] * x[i];
          expected[2] += y[i] * y[i];
        }
        std::vector<char> p = Encoded(dtype, x), q = Encoded(dtype, y);
        kernels->products(dtype, p.data(), q.data(), n, found);
        for (int k = 0; k < 3; ++k) EXPECT(found[k] == expected[k]);
        kernels->weighted_sum(dtype, q.data(), p.data(), 2, q.data(), 0.5, n);
        for (size_t i = 0; i < n; ++i)
          EXPECT(Decoded(dtype, q.data() + i * SizeOf(dtype)) == 2 * x[i] + 0.5 * y[i]);
      }
}

}  // namespace
}  // namespace sparkvod
