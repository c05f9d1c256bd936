#include "native/transport/tcp/stream.h"

#include <sys/socket.h>

#include <cerrno>

#include "native/transport/socket.h"

namespace sparkvod {
namespace {

Result Failed(int error) { return Result::Errno("its connection failed", error, Code::kPeerLost); }

}  // namespace

Result Stream::Send(const void* data, size_t bytes, size_t* sent) {
  if (tls_ != nullptr) return tls_->Send(data, bytes, sent);
  const ssize_t n = ::send(socket_.get(), data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
  *sent = n > 0 ? static_cast<size_t>(n) : 0;
  return n < 0 && !WouldBlock(errno) ? Failed(errno) : Result::Ok();
}

Result Stream::Receive(void* data, size_t bytes, int flags, size_t* received) {
  const ssize_t n = ::recv(socket_.get(), data, bytes, MSG_DONTWAIT | flags);
  *received = n > 0 ? static_cast<size_t>(n) : 0;
  if (n < 0 && !WouldBlock(errno)) return Failed(errno);
  if (n != 0 || bytes == 0) return {};
  closed_ = true;
  return Result::Fail(Code::kPeerLost, "it closed its connection");
}

Result Stream::Recv(void* data, size_t bytes, size_t* received) {
  return tls_ != nullptr ? tls_->Recv(data, bytes, received) : Receive(data, bytes, 0, received);
}

Result Stream::Peek(void* data, size_t bytes, size_t* available) {
  return tls_ != nullptr ? tls_->Peek(data, bytes, available)
                         : Receive(data, bytes, MSG_PEEK, available);
}

void Stream::End() {
  if (tls_ != nullptr) tls_->Close();
  ::shutdown(socket_.get(), SHUT_WR);
}

}  // namespace sparkvod
