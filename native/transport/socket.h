// Small wrappers of the socket calls that bootstrap and transports need.
#pragma once

#include <cerrno>
#include <string>
#include <vector>

#include "native/base/result.h"
#include "native/transport/fd.h"

namespace sparkvod {

// Listens on `address` (empty: all, IPv6 and IPv4) and a port of `range` ("first-last"; empty:
// any).
Result ListenTcp(const std::string& address, const std::string& range, Fd* out, int* port);
// Listens on an abstract Unix socket.
Result ListenUnix(const std::string& name, Fd* out);
// Whether nobody listens on such a socket. It needs a descriptor, and says no without one.
bool UnixNameIsFree(const std::string& name);
// Begins to connect; the descriptor is non-blocking and becomes writable when the attempt has
// ended.
Result StartConnectTcp(const std::string& address, int port, Fd* out);
Result StartConnectUnix(const std::string& name, Fd* out);
// How the attempt has ended.
Result FinishConnect(int fd);
// Accepts one connection, non-blocking; an invalid descriptor when there is none. An error when
// there is no descriptor for it.
Result Accept(int listener, Fd* out);
// Whether the other end of a Unix socket is a process of another user; false for other sockets.
bool IsAnotherUsers(int fd);
// Whether a call on a non-blocking descriptor failed with `error` for want of bytes or room only.
inline bool WouldBlock(int error) {
  return error == EAGAIN || error == EWOULDBLOCK || error == EINTR;
}
// No Nagle delay, large buffers.
void TuneTcp(int fd);
// Makes a connection on which nothing is under way fail once the kernel at its other end has
// answered nothing for about `seconds`, at least 3; 0: as the system has it.
void KeepAlive(int fd, double seconds);

// One datagram's worth of bytes with descriptors over a connected Unix socket. Receiving takes what
// one call of the other end has sent, `most` bytes of it, and blocks until `deadline_ms` have
// passed.
Result SendWithFds(int socket, const std::string& bytes, const std::vector<int>& fds);
Result RecvWithFds(int socket, size_t most, int deadline_ms, std::string* out,
                   std::vector<Fd>* fds);

}  // namespace sparkvod
