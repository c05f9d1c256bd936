// Results become Python exceptions of sparkvod.errors; this is the only place where C++ throws.
#pragma once

#include <pybind11/pybind11.h>

#include "native/base/result.h"

namespace sparkvod {

// Throws what corresponds to the result's code; with the GIL held.
inline void Throw(const Result& result) {
  namespace py = pybind11;
  // A signal that ended a wait is a KeyboardInterrupt, or what its handler raised.
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  const char* name = nullptr;
  switch (result.code()) {
    case Code::kOk:
      return;
    case Code::kInvalid:
      PyErr_SetString(PyExc_ValueError, result.Report().c_str());
      throw py::error_already_set();
    case Code::kMismatch:
      name = "MismatchError";
      break;
    case Code::kPeerLost:
      name = "PeerLostError";
      break;
    case Code::kTimeout:
      name = "CollectiveTimeoutError";
      break;
    case Code::kShutDown:
      name = "ShutDownError";
      break;
    case Code::kSystem:
      name = "HorovodInternalError";
      break;
  }
  const py::object type = py::module_::import("sparkvod.errors").attr(name);
  PyErr_SetString(type.ptr(), result.Report().c_str());
  throw py::error_already_set();
}

inline void ThrowIfFailed(const Result& result) {
  if (!result.ok()) Throw(result);
}

}  // namespace sparkvod
