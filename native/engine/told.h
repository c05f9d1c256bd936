// What the timeline is told about an operation.
#pragma once

#include <vector>

#include "native/base/timeline.h"
#include "native/engine/operation.h"

namespace sparkvod {

// The life of an operation that ends at `ended_ns`, in the lane of its name: the whole, and inside
// it "queue" (nobody drove yet), "negotiate" (until all ranks had submitted it), "wait" (others
// were executed before it) and "execute". What happened before the timeline began is left out.
std::vector<Slice> LifeOf(const Operation& operation, int64_t ended_ns);

}  // namespace sparkvod
