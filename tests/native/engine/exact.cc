#include "tests/native/engine/exact.h"

#include <algorithm>
#include <cstring>

#include "native/kernels/reduce.h"

namespace sparkvod::check {

const std::vector<DType> kReduced = {DType::kFloat32,  DType::kFloat64, DType::kFloat16,
                                     DType::kBFloat16, DType::kInt32,   DType::kInt64,
                                     DType::kUInt8,    DType::kInt8,    DType::kUInt16,
                                     DType::kInt16,    DType::kBool};
const std::vector<ReduceOp> kOps = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin,
                                    ReduceOp::kMax, ReduceOp::kProduct};

namespace {

// After so many elements Term begins again, for every rank.
constexpr size_t kPeriod = 31 * 12;

bool IsUnsigned(DType dtype) {
  return dtype == DType::kUInt8 || dtype == DType::kUInt16 || dtype == DType::kBool;
}

// The sums over all ranks are exact in every dtype, as are the products, since those take powers of
// two; in a large world the numbers are smaller and the twos fewer.
int64_t Term(DType dtype, ReduceOp op, int size, int rank, size_t i) {
  const size_t place = i * 5 + static_cast<size_t>(rank) * 11;
  const bool large = size > 8;
  if (dtype == DType::kBool) return static_cast<int64_t>(place % 3 == 0);
  if (op == ReduceOp::kProduct) {
    const int64_t power = place % (large ? 12 : 3) == 0 ? 2 : 1;
    return place % 4 == 1 && !IsUnsigned(dtype) ? -power : power;
  }
  const int64_t most = large ? 2 : 30;
  return static_cast<int64_t>(place % 31) * most / 30 - (IsUnsigned(dtype) ? 0 : most / 2);
}

// Whole numbers as elements of a dtype, by way of int32 -> the kernels' own float32 for halves.
std::vector<uint8_t> Elements(DType dtype, const std::vector<int64_t>& values) {
  std::vector<uint8_t> bytes(values.size() * SizeOf(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    uint8_t* p = bytes.data() + i * SizeOf(dtype);
    const auto f = static_cast<float>(values[i]);
    const auto d = static_cast<double>(values[i]);
    const auto n = static_cast<int32_t>(values[i]);
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    uint16_t half = static_cast<uint16_t>(bits >> 16);  // exact: at most eight bits
    switch (dtype) {
      case DType::kFloat32:
        std::memcpy(p, &f, 4);
        break;
      case DType::kFloat64:
        std::memcpy(p, &d, 8);
        break;
      case DType::kInt32:
        std::memcpy(p, &n, 4);
        break;
      case DType::kInt64:
        std::memcpy(p, &values[i], 8);
        break;
      case DType::kUInt8:
      case DType::kInt8:
      case DType::kBool:
        std::memcpy(p, &n, 1);  // the low bytes, which is how sums and products wrap
        break;
      case DType::kUInt16:
      case DType::kInt16:
        std::memcpy(p, &n, 2);
        break;
      case DType::kFloat16:
        half = values[i] == 0 ? 0
                              : static_cast<uint16_t>(((bits >> 16) & 0x8000) |
                                                      (((bits & 0x7fffffff) >> 13) - (112u << 10)));
        [[fallthrough]];
      default:
        std::memcpy(p, &half, 2);
    }
  }
  return bytes;
}

int64_t Combined(DType dtype, ReduceOp op, int64_t a, int64_t b) {
  switch (op) {
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kProduct:
      return a * b;
    default:
      return dtype == DType::kBool ? a | b : a + b;
  }
}

// The first period over and over.
std::vector<uint8_t> Repeated(const std::vector<uint8_t>& period, size_t bytes) {
  std::vector<uint8_t> all(bytes);
  for (size_t at = 0; at < bytes; at += period.size())
    std::memcpy(all.data() + at, period.data(), std::min(period.size(), bytes - at));
  return all;
}

}  // namespace

bool Supported(DType dtype, ReduceOp op) {
  return dtype != DType::kBool || op != ReduceOp::kAverage;
}

std::vector<uint8_t> Input(DType dtype, ReduceOp op, int size, int rank, size_t count) {
  std::vector<int64_t> values(std::min(count, kPeriod));
  for (size_t i = 0; i < values.size(); ++i) values[i] = Term(dtype, op, size, rank, i);
  return Repeated(Elements(dtype, values), count * SizeOf(dtype));
}

std::vector<uint8_t> Expected(DType dtype, ReduceOp op, int size, size_t count) {
  std::vector<int64_t> results(std::min(count, kPeriod));
  for (size_t i = 0; i < results.size(); ++i) {
    results[i] = Term(dtype, op, size, 0, i);
    for (int r = 1; r < size; ++r)
      results[i] = Combined(dtype, op, results[i], Term(dtype, op, size, r, i));
    if (op == ReduceOp::kAverage && !IsFloating(dtype)) results[i] /= size;
  }
  std::vector<uint8_t> bytes = Elements(dtype, results);
  if (op == ReduceOp::kAverage && IsFloating(dtype))
    KernelsFor(Isa::kPortable)
        ->scale(dtype, bytes.data(), bytes.data(), results.size(), 1.0 / size);
  return Repeated(bytes, count * SizeOf(dtype));
}

Block::Block(Engine& engine, bool in_engine, const std::vector<uint8_t>& bytes) {
  if (!in_engine) {
    own_ = bytes;
    return;
  }
  EXPECT_EQ(engine.Allocate(bytes.size(), &memory_).Report(), "ok");
  if (!bytes.empty()) std::memcpy(memory_->data(), bytes.data(), bytes.size());
}

bool Block::Holds(const std::vector<uint8_t>& bytes) {
  return bytes.empty() || std::memcmp(data(), bytes.data(), bytes.size()) == 0;
}

void CheckAllreduce(Engine& engine, DType dtype, size_t count, Place place, ReduceOp op) {
  const int rank = engine.topology().rank, size = engine.topology().size;
  const std::vector<uint8_t> input = Input(dtype, op, size, rank, count);
  Block in(engine, place == Place::kEngine, input);
  Block apart(engine, false, std::vector<uint8_t>(place == Place::kApart ? input.size() : 0));
  Block& out = place == Place::kApart ? apart : in;
  const std::string name = std::string(NameOf(dtype)) + "." + std::to_string(count) + "." +
                           std::to_string(static_cast<int>(place)) + NameOf(op);
  const Request request = AllreduceOf(name, dtype, {static_cast<int64_t>(count)}, op);
  const Result result = Run(engine, request, {{in.data(), out.data(), count}});
  if (!result.ok())
    Fail(__FILE__, __LINE__, name + ": " + result.Report());
  else if (!out.Holds(Expected(dtype, op, size, count)))
    Fail(__FILE__, __LINE__, name + " is wrong on rank " + std::to_string(rank));
  if (place == Place::kApart) EXPECT(in.Holds(input));
}

}  // namespace sparkvod::check
