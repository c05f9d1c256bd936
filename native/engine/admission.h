// What an engine refuses at the caller, before any other rank hears of it.
#pragma once

#include <vector>

#include "native/backends/backend.h"
#include "native/engine/members.h"
#include "native/engine/request.h"

namespace sparkvod {

// Checks a request of one of `members`, with the memory of its tensors, and fills in what follows
// from it: the splits of an alltoall that has none.
Result Admit(const Backend& backend, const Members& members, const std::vector<Part>& parts,
             Request* request);

}  // namespace sparkvod
