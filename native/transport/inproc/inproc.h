// Ranks that are threads of one process: they share each other's arenas by pointer.
#pragma once

#include <memory>

#include "native/transport/shared/ring_channel.h"

namespace sparkvod::inproc {

constexpr const char* kName = "inproc";

// Hands the own arena to the rank at the other end of an authenticated socket of this very process.
Result Offer(int socket, const std::shared_ptr<Arena>& arena);
Result Receive(int socket, int deadline_ms, std::shared_ptr<Arena>* out);

}  // namespace sparkvod::inproc
