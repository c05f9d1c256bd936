// Dictionaries by the names of knobs <-> Tunables.
#pragma once

#include <pybind11/pybind11.h>

#include <cmath>
#include <string>

#include "native/base/tunables.h"

namespace sparkvod {

// The engine counts in thousandths what the knob link_gbits has in 10^9 bits per second.
constexpr const char* kGbits = "link_gbits";
inline bool IsLink(const Tunable& t) { return t.value == &Tunables::link_mbits; }
inline const char* KnobOf(const Tunable& t) { return IsLink(t) ? kGbits : t.name; }

inline pybind11::object ToPython(const Tunable& t, int64_t value) {
  if (IsLink(t)) return pybind11::float_(static_cast<double>(value) / 1000);
  return pybind11::int_(value);
}

inline pybind11::dict DictFrom(const Tunables& tunables) {
  pybind11::dict dict;
  for (const Tunable& t : kTunables) dict[KnobOf(t)] = ToPython(t, tunables.*t.value);
  return dict;
}

// `tunables`, but for what the dictionary has.
inline Tunables TunablesFrom(const pybind11::dict& dict, Tunables tunables) {
  namespace py = pybind11;
  py::dict left = dict.attr("copy")();
  for (const Tunable& t : kTunables) {
    if (!left.contains(KnobOf(t))) continue;
    const py::object value = left.attr("pop")(KnobOf(t));
    if (!IsLink(t)) {
      tunables.*t.value = value.cast<int64_t>();
      continue;
    }
    const double mbits = value.cast<double>() * 1000;
    if (!(std::abs(mbits) < 1e15))
      throw py::value_error("link_gbits=" + py::str(value).cast<std::string>() +
                            " was found, 10^9 bits per second of a link were expected");
    tunables.*t.value = std::llround(mbits);
  }
  if (!left.empty()) {
    std::string known;
    for (const Tunable& t : kTunables)
      known += (known.empty() ? "" : ", ") + std::string(KnobOf(t));
    throw py::value_error("no knobs of these names can be tuned: " +
                          py::str(", ").attr("join")(left).cast<std::string>() + "; of " + known +
                          " some were expected");
  }
  return tunables;
}

}  // namespace sparkvod
