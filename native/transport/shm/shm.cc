#include "native/transport/shm/shm.h"

#include <sys/stat.h>

#include <string>

#include "native/transport/socket.h"

namespace sparkvod::shm {

Result Offer(int socket, const std::shared_ptr<Arena>& arena) {
  return SendWithFds(socket, "m", {arena->memory_fd(), arena->idle_bell(), arena->driver_bell()});
}

Result Receive(int socket, const Geometry& geometry, int deadline_ms, std::shared_ptr<Arena>* out) {
  std::string byte;
  std::vector<Fd> fds;
  SPARKVOD_TRY(RecvWithFds(socket, 1, 3, deadline_ms, &byte, &fds));
  struct stat status{};
  if (::fstat(fds[0].get(), &status) != 0 ||
      static_cast<size_t>(status.st_size) != geometry.total())
    return Result::Fail(Code::kInvalid, "a local rank's shared memory has " +
                                            std::to_string(status.st_size) + " bytes, " +
                                            std::to_string(geometry.total()) + " were expected");
  return Arena::Attach(geometry, std::move(fds[0]), std::move(fds[1]), std::move(fds[2]), out);
}

}  // namespace sparkvod::shm
