// Ranks that are processes of one host: they map each other's arenas, memfds passed over a Unix
// socket.
#pragma once

#include <memory>
#include <string>

#include "native/transport/shared/ring_channel.h"

namespace sparkvod::shm {

constexpr const char* kName = "shm";

// Hands the arena over to the rank at the other end, or tells it that this one leaves instead. That
// the other has left is found by who receives.
Result Offer(int socket, const std::shared_ptr<Arena>& arena);
void Refuse(int socket, const Departure& how);

// Whether the other end has left instead; what it offers stays to be received. False while nothing
// has come.
bool Refused(int socket, Departure* how);
// Takes what it offers. When it has left instead, that is the error, and `who` is what it is
// called.
Result Receive(int socket, const std::string& who, const Geometry& geometry, int deadline_ms,
               std::shared_ptr<Arena>* out);

}  // namespace sparkvod::shm
