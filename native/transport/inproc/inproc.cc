#include "native/transport/inproc/inproc.h"

#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "native/transport/socket.h"

namespace sparkvod::inproc {
namespace {

// What was offered and not taken yet. Only a number travels, so that nothing is lost with a message
// that is never read; weak, because who gives up before takes its arena along.
struct Offers {
  std::mutex mu;
  std::map<uint64_t, std::weak_ptr<Arena>> arenas;
  uint64_t last = 0;
};

Offers& AllOffers() {
  static Offers& offers = *new Offers;  // never destroyed: engines may outlive static objects
  return offers;
}

}  // namespace

Result Offer(int socket, const std::shared_ptr<Arena>& arena) {
  Offers& offers = AllOffers();
  std::lock_guard<std::mutex> lock(offers.mu);
  for (auto it = offers.arenas.begin(); it != offers.arenas.end();)
    it = it->second.expired() ? offers.arenas.erase(it) : std::next(it);
  const uint64_t number = ++offers.last;
  offers.arenas[number] = arena;
  return SendWithFds(socket, std::string(reinterpret_cast<const char*>(&number), sizeof number),
                     {});
}

// The number is believed because the socket is authenticated and both ends have shown the same
// process identity.
Result Receive(int socket, int deadline_ms, std::shared_ptr<Arena>* out) {
  uint64_t number = 0;
  std::string bytes;
  std::vector<Fd> none;
  SPARKVOD_TRY(RecvWithFds(socket, sizeof number, 0, deadline_ms, &bytes, &none));
  std::memcpy(&number, bytes.data(), sizeof number);
  Offers& offers = AllOffers();
  std::lock_guard<std::mutex> lock(offers.mu);
  const auto it = offers.arenas.find(number);
  if (it != offers.arenas.end()) {
    *out = it->second.lock();
    offers.arenas.erase(it);
  }
  if (*out == nullptr)
    return Result::Fail(Code::kPeerLost, "a local rank left while it handed over its memory");
  return {};
}

}  // namespace sparkvod::inproc
