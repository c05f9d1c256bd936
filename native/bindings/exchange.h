// How a framework's tensor lies in memory, asked of the framework by a call of C: through the table
// of DLPack's exchange API (version 1, https://dmlc.github.io/dlpack), which a tensor's type may
// offer as a capsule. Asking by Python's attributes takes several times as long as a small
// collective.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "native/engine/request.h"

namespace sparkvod {

struct ExchangeTable;

// What tells of the tensors of some types.
class Exchange {
 public:
  // `table`: the capsule of a type; `types`: that type and those derived from it that are the same
  // to the framework; `negated`: the method by which a tensor says that it stands for the negative
  // of what lies in its memory. Throws ValueError where the table is of another version, or cannot
  // tell.
  Exchange(pybind11::capsule table, std::vector<pybind11::type> types, pybind11::str negated);

  // Whether a tensor lies contiguously in memory that the CPU can address, and has a dtype of ours;
  // then where, and what it is. False for any other tensor, and for what is none.
  bool Look(pybind11::handle tensor, Entry* entry, Part* part) const;

 private:
  pybind11::capsule capsule_;  // keeps the table
  const ExchangeTable* table_;
  std::vector<pybind11::type> types_;
  pybind11::str negated_;
};

}  // namespace sparkvod
