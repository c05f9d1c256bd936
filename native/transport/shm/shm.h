// Ranks that are processes of one host: they map each other's arenas, memfds passed over a Unix
// socket.
#pragma once

#include <memory>

#include "native/transport/shared/ring_channel.h"

namespace sparkvod::shm {

constexpr const char* kName = "shm";

Result Offer(int socket, const std::shared_ptr<Arena>& arena);
Result Receive(int socket, const Geometry& geometry, int deadline_ms, std::shared_ptr<Arena>* out);

}  // namespace sparkvod::shm
