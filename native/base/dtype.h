// Element types and reduce operations, with the codes that the Python side uses.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sparkvod {

enum class DType : uint8_t {
  kUInt8 = 0,
  kInt8,
  kUInt16,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kBool,
};
constexpr int kDTypeCount = 11;

enum class ReduceOp : uint8_t { kAverage = 0, kSum, kAdasum, kMin, kMax, kProduct };
constexpr int kReduceOpCount = 6;

// A code that came over a wire or from Python names a dtype, or an operation, only if this says so.
constexpr bool IsDType(int code) { return code >= 0 && code < kDTypeCount; }
constexpr bool IsReduceOp(int code) { return code >= 0 && code < kReduceOpCount; }

// Bytes per element; 0 for a value that is no dtype.
constexpr size_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kBool:
      return 1;
    case DType::kUInt16:
    case DType::kInt16:
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kInt32:
    case DType::kFloat32:
      return 4;
    case DType::kInt64:
    case DType::kFloat64:
      return 8;
  }
  return 0;
}

constexpr bool IsFloating(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

constexpr const char* NameOf(DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
      return "uint8";
    case DType::kInt8:
      return "int8";
    case DType::kUInt16:
      return "uint16";
    case DType::kInt16:
      return "int16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kBool:
      return "bool";
  }
  return "unknown";
}

constexpr const char* NameOf(ReduceOp op) {
  switch (op) {
    case ReduceOp::kAverage:
      return "average";
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAdasum:
      return "adasum";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kProduct:
      return "product";
  }
  return "unknown";
}

}  // namespace sparkvod
