#include "native/transport/shm/shm.h"

#include <sys/socket.h>
#include <sys/stat.h>

#include <string>
#include <vector>

#include "native/transport/socket.h"

namespace sparkvod::shm {
namespace {

// What comes with the descriptors. No departure begins so.
constexpr char kOffer = 'm';

}  // namespace

Result Offer(int socket, const std::shared_ptr<Arena>& arena) {
  const Result sent = SendWithFds(socket, std::string(1, kOffer),
                                  {arena->memory_fd(), arena->idle_bell(), arena->driver_bell()});
  // Why the other has gone stands in what it has sent before.
  return sent.code() == Code::kPeerLost ? Result::Ok() : sent;
}

void Refuse(int socket, const Departure& how) {
  (void)!SendWithFds(socket, Encode(how), {}).ok();  // who has gone as well need not be told
  ::shutdown(socket, SHUT_WR);
}

bool Refused(int socket, Departure* how) {
  std::string heard(kCauseLimit + 16, '\0');
  const ssize_t n = ::recv(socket, heard.data(), heard.size(), MSG_PEEK | MSG_DONTWAIT);
  if (n < 0 && WouldBlock(errno)) return false;
  *how = Departure{};
  how->cause = "its process ended";
  if (n <= 0) return true;
  heard.resize(static_cast<size_t>(n));
  if (heard[0] == kOffer) return false;
  Decode(heard, true, how);
  return true;
}

Result Receive(int socket, const std::string& who, const Geometry& geometry, int deadline_ms,
               std::shared_ptr<Arena>* out) {
  Departure how;
  std::string word;
  std::vector<Fd> fds;
  const Result received = RecvWithFds(socket, kCauseLimit + 16, deadline_ms, &word, &fds);
  if (received.code() == Code::kPeerLost) {
    how.cause = received.Report();
    return LeftWhileConnecting(who, how);
  }
  if (received.code() == Code::kTimeout)
    return Result::Fail(received.code(), who + ": " + received.Report());
  if (!received.ok()) return received;
  if (word[0] != kOffer || fds.size() != 3) {
    Decode(word, true, &how);
    return LeftWhileConnecting(who, how);
  }
  struct stat status{};
  if (::fstat(fds[0].get(), &status) != 0 ||
      static_cast<size_t>(status.st_size) != geometry.total())
    return Result::Fail(Code::kInvalid, "the shared memory of " + who + " has " +
                                            std::to_string(status.st_size) + " bytes, " +
                                            std::to_string(geometry.total()) + " were expected");
  return Arena::Attach(geometry, std::move(fds[0]), std::move(fds[1]), std::move(fds[2]), out);
}

}  // namespace sparkvod::shm
