#include "native/transport/inproc/inproc.h"

#include <cstring>
#include <string>

#include "native/transport/socket.h"

namespace sparkvod::inproc {

// What travels is the address of a heap-allocated reference; the receiver owns it then. It is
// believed because the socket is authenticated and both ends have shown the same process identity.
Result Offer(int socket, const std::shared_ptr<Arena>& arena) {
  auto* reference = new std::shared_ptr<Arena>(arena);
  const std::string bytes(reinterpret_cast<const char*>(&reference), sizeof reference);
  const Result sent = SendWithFds(socket, bytes, {});
  if (!sent.ok()) delete reference;
  return sent;
}

Result Receive(int socket, int deadline_ms, std::shared_ptr<Arena>* out) {
  std::shared_ptr<Arena>* reference = nullptr;
  std::string bytes;
  std::vector<Fd> none;
  SPARKVOD_TRY(RecvWithFds(socket, sizeof reference, 0, deadline_ms, &bytes, &none));
  std::memcpy(&reference, bytes.data(), sizeof reference);
  *out = std::move(*reference);
  delete reference;
  return {};
}

}  // namespace sparkvod::inproc
