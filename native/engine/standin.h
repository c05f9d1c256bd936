// What a rank that has joined contributes to the others' collectives: the neutral element, or
// nothing.
#pragma once

#include <memory>
#include <vector>

#include "native/engine/members.h"
#include "native/engine/operation.h"

namespace sparkvod {

// The request that an absent rank stands in with for what the others ask for: their tensors, but no
// rows of what is gathered or exchanged.
Request StandInRequest(const Request& asked);

// Its operation, with memory of its own, of which there may be too little.
Result StandIn(const Request& request, int rank, int size, std::shared_ptr<Operation>* out);

// Why a collective of these ranks cannot do without the absent ones; ok when it can. By place.
Result CheckAbsent(const std::vector<Request>& by_rank, const std::vector<bool>& absent,
                   const Members& members);

}  // namespace sparkvod
