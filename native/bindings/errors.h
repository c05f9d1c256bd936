// Results become Python exceptions of sparkvod.errors; this is the only place where C++ throws.
#pragma once

#include <pybind11/pybind11.h>

#include "native/base/result.h"

namespace sparkvod {

// The exception that a code stands for: a class of sparkvod.errors, or ValueError; null for kOk.
constexpr const char* ErrorName(Code code) {
  switch (code) {
    case Code::kOk:
      return nullptr;
    case Code::kInvalid:
      return "ValueError";
    case Code::kMismatch:
      return "MismatchError";
    case Code::kPeerLost:
      return "PeerLostError";
    case Code::kTimeout:
      return "CollectiveTimeoutError";
    case Code::kShutDown:
      return "ShutDownError";
    case Code::kSystem:
      break;
  }
  return "HorovodInternalError";
}

// Throws what corresponds to the result's code; with the GIL held.
inline void Throw(const Result& result) {
  namespace py = pybind11;
  // A signal that ended a wait is a KeyboardInterrupt, or what its handler raised.
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (result.ok()) return;
  if (result.code() == Code::kInvalid) {
    PyErr_SetString(PyExc_ValueError, result.Report().c_str());
    throw py::error_already_set();
  }
  const py::object type = py::module_::import("sparkvod.errors").attr(ErrorName(result.code()));
  PyErr_SetString(type.ptr(), result.Report().c_str());
  throw py::error_already_set();
}

inline void ThrowIfFailed(const Result& result) {
  if (!result.ok()) Throw(result);
}

}  // namespace sparkvod
