#include "native/transport/tcp/tcp_channel.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "native/base/wire.h"
#include "native/transport/socket.h"

namespace sparkvod {
namespace {
constexpr size_t kCauseLimit = 1024;
bool WouldBlock(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }
}  // namespace

TcpChannel::TcpChannel(Fd socket) : socket_(std::move(socket)) { TuneTcp(socket_.get()); }

Result TcpChannel::TrySend(const void* data, size_t bytes, size_t* sent) {
  *sent = 0;
  if (bytes == 0) return {};
  const ssize_t n = ::send(socket_.get(), data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n >= 0)
    *sent = static_cast<size_t>(n);
  else if (!WouldBlock(errno))
    return Result::Errno("its connection failed", errno, Code::kPeerLost);
  return {};
}

Result TcpChannel::Receive(void* data, size_t bytes, int flags, size_t* received) {
  *received = 0;
  if (bytes == 0) return {};
  const ssize_t n = ::recv(socket_.get(), data, bytes, MSG_DONTWAIT | flags);
  if (n > 0)
    *received = static_cast<size_t>(n);
  else if (n == 0)
    return Result::Fail(Code::kPeerLost, "it closed its connection");
  else if (!WouldBlock(errno))
    return Result::Errno("its connection failed", errno, Code::kPeerLost);
  return {};
}

Result TcpChannel::TryRecv(void* data, size_t bytes, size_t* received) {
  return Receive(data, bytes, 0, received);
}

Result TcpChannel::Peek(void* data, size_t bytes, size_t* available) {
  return Receive(data, bytes, MSG_PEEK, available);
}

int64_t TcpChannel::round_trip_us() const {
  tcp_info info{};
  socklen_t length = sizeof info;
  // A kernel that knows less of it fills less of it. Until it has measured, it says ~0.
  const bool known = ::getsockopt(socket_.get(), IPPROTO_TCP, TCP_INFO, &info, &length) == 0 &&
                     length >= offsetof(tcp_info, tcpi_min_rtt) + sizeof info.tcpi_min_rtt &&
                     info.tcpi_min_rtt != ~uint32_t{0};
  return known ? std::max<int64_t>(info.tcpi_min_rtt, 1) : 1;
}

bool TcpLink::Left(Departure* how) {
  char buffer[kCauseLimit + 16];
  for (;;) {
    const ssize_t n = ::recv(socket_.get(), buffer, sizeof buffer, MSG_DONTWAIT);
    if (n > 0) {
      heard_.append(buffer, static_cast<size_t>(n));
      if (heard_.size() > 4 * kCauseLimit) break;
      continue;
    }
    if (n < 0 && WouldBlock(errno)) {
      if (heard_.empty()) return false;
      break;
    }
    if (heard_.empty()) {
      *how = Departure{};
      how->cause =
          n == 0 ? "its process ended or its host closed the connection" : std::strerror(errno);
      return true;
    }
    break;
  }
  Reader reader(heard_);
  how->orderly = reader.Get<uint8_t>() != 0;
  how->relayed = reader.Get<uint8_t>() != 0;
  how->code = static_cast<Code>(reader.Get<uint8_t>());
  how->cause = reader.GetString(kCauseLimit);
  if (!reader.ok()) {
    *how = Departure{};
    how->cause = "it left in the middle of a word";
  }
  return true;
}

void TcpLink::Leave(const Departure& how) {
  Writer writer;
  writer.Put<uint8_t>(how.orderly ? 1 : 0);
  writer.Put<uint8_t>(how.relayed ? 1 : 0);
  writer.Put<uint8_t>(static_cast<uint8_t>(how.code));
  writer.PutString(how.cause.substr(0, kCauseLimit));
  // The socket has carried nothing so far, so its buffer takes the whole message; a dead peer needs
  // none.
  (void)!::send(socket_.get(), writer.bytes().data(), writer.bytes().size(),
                MSG_NOSIGNAL | MSG_DONTWAIT);
  ::shutdown(socket_.get(), SHUT_WR);
}

}  // namespace sparkvod
