#include "native/bindings/exchange.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>

#include "native/kernels/reduce.h"

namespace py = pybind11;

namespace sparkvod {
namespace {

constexpr uint32_t kMajorVersion = 1;
constexpr int32_t kCpu = 1;

// A tensor, as DLPack lays it out.
struct Tensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t kind, bits;
  uint16_t lanes;
  const int64_t* shape;
  const int64_t* strides;  // in elements
  uint64_t byte_offset;
};

struct Kind {
  uint8_t kind, bits;
  DType dtype;
};
constexpr uint8_t kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6;
constexpr Kind kKinds[] = {
    {kFloat, 32, DType::kFloat32}, {kFloat, 16, DType::kFloat16}, {kBfloat, 16, DType::kBFloat16},
    {kFloat, 64, DType::kFloat64}, {kInt, 64, DType::kInt64},     {kInt, 32, DType::kInt32},
    {kInt, 16, DType::kInt16},     {kInt, 8, DType::kInt8},       {kUInt, 8, DType::kUInt8},
    {kUInt, 16, DType::kUInt16},   {kBool, 8, DType::kBool},
};

bool IsContiguous(const Tensor& tensor) {
  int64_t expected = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

}  // namespace

struct ExchangeTable {
  uint32_t major, minor;
  const void* previous;
  void* of_no_use_here[3];
  int (*look)(void* tensor, Tensor* out);
  void* stream;
};

Exchange::Exchange(py::capsule table, std::vector<py::type> types, py::str negated)
    : capsule_(std::move(table)),
      table_(capsule_.get_pointer<ExchangeTable>()),
      types_(std::move(types)),
      negated_(std::move(negated)) {
  if (table_->major != kMajorVersion || table_->look == nullptr)
    throw py::value_error("a DLPack exchange table of version " + std::to_string(table_->major) +
                          " was found, one of version 1 that tells of tensors was expected");
}

bool Exchange::Look(py::handle tensor, Entry* entry, Part* part) const {
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
  const auto is_its = [&](const py::type& known) { return known.ptr() == type; };
  if (std::none_of(types_.begin(), types_.end(), is_its)) return false;
  Tensor seen{};
  if (table_->look(tensor.ptr(), &seen) != 0) {
    PyErr_Clear();  // of a layout without an address, of which the caller finds out by itself
    return false;
  }
  const auto* kind = std::find_if(std::begin(kKinds), std::end(kKinds), [&](const Kind& k) {
    return k.kind == seen.kind && k.bits == seen.bits;
  });
  if (seen.device_type != kCpu || seen.lanes != 1 || kind == std::end(kKinds) ||
      !IsContiguous(seen))
    return false;
  const auto negated =
      py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor.ptr(), negated_.ptr()));
  if (!negated) throw py::error_already_set();
  if (negated.ptr() == Py_True) return false;
  entry->dtype = kind->dtype;
  entry->shape.assign(seen.shape, seen.shape + seen.ndim);
  char* data = static_cast<char*>(seen.data) + seen.byte_offset;
  *part = {data, data, static_cast<size_t>(entry->count())};
  return true;
}

}  // namespace sparkvod
