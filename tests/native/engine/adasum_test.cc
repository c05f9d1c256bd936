// Adasum: the tree written out in double, for any number of ranks, several tensors and every
// floating dtype.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "native/kernels/reduce.h"
#include "tests/native/world.h"

namespace sparkvod {
namespace {

using namespace check;  // NOLINT: a test of what check's worlds run

using Vector = std::vector<double>;

Vector Combined(const Vector& a, const Vector& b) {
  double ab = 0, aa = 0, bb = 0;
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

// Small whole numbers and halves of them, exact in every dtype.
double Term(int rank, size_t tensor, size_t i) {
  if (tensor == 1 && rank == 1) return 0;  // a vector without a direction
  return static_cast<double>((i * 7 + static_cast<size_t>(rank) * (5 + i % 3) + tensor) % 17) *
             0.5 -
         3;
}

Vector Expected(int size, size_t tensor, size_t count) {
  std::vector<Vector> left;
  for (int r = 0; r < size; ++r) {
    left.emplace_back(count);
    for (size_t i = 0; i < count; ++i) left.back()[i] = Term(r, tensor, i);
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
    if (dtype == DType::kFloat64)
      std::memcpy(to, &values[i], 8);
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

void CheckAdasum(Engine& engine, DType dtype, const std::vector<size_t>& counts,
                 bool in_engine = false) {
  const int rank = engine.topology().rank, size = engine.topology().size;
  Request request;
  request.name = std::string(NameOf(dtype)) + std::to_string(counts[0]);
  request.op = ReduceOp::kAdasum;
  std::vector<std::vector<char>> data;
  for (size_t t = 0; t < counts.size(); ++t) {
    Vector mine(counts[t]);
    for (size_t i = 0; i < counts[t]; ++i) mine[i] = Term(rank, t, i);
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
    const Vector expected = Expected(size, t, counts[t]);
    for (size_t i = 0; i < counts[t]; ++i) {
      const double found = Decoded(dtype, data[t].data() + i * SizeOf(dtype));
      if (std::abs(found - expected[i]) <= close) continue;
      return Fail(__FILE__, __LINE__,
                  request.name + ": tensor " + std::to_string(t) + ", element " +
                      std::to_string(i) + " is " + std::to_string(found) + ", " +
                      std::to_string(expected[i]) + " was expected");
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
        double expected[3] = {0, 0, 0}, found[3];
        for (size_t i = 0; i < n; ++i) {
          x[i] = a[i % 3];
          y[i] = b[i % 3];
          expected[0] += x[i] * y[i];
          expected[1] += x[i] * x[i];
          expected[2] += y[i] * y[i];
        }
        std::vector<char> p = Encoded(dtype, x), q = Encoded(dtype, y);
        kernels->products(dtype, p.data(), q.data(), n, found);
        for (int k = 0; k < 3; ++k) EXPECT_EQ(found[k], expected[k]);
        kernels->weighted_sum(dtype, q.data(), p.data(), 2, q.data(), 0.5, n);
        for (size_t i = 0; i < n; ++i)
          EXPECT_EQ(Decoded(dtype, q.data() + i * SizeOf(dtype)), 2 * x[i] + 0.5 * y[i]);
      }
}

}  // namespace
}  // namespace sparkvod
