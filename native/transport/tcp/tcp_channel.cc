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

TcpChannel::TcpChannel(std::vector<Fd> streams) : streams_(std::move(streams)) {
  for (const Fd& stream : streams_) TuneTcp(stream.get());
}

size_t TcpChannel::Here(const Place& place, size_t bytes) const {
  return streams_.size() == 1 ? bytes : std::min(bytes, place.left);
}

void TcpChannel::Advance(Place* place, size_t bytes) const {
  if (streams_.size() == 1) return;
  place->left -= bytes;
  if (place->left > 0) return;
  place->left = kBlockBytes;
  place->stream = (place->stream + 1) % streams_.size();
}

Result TcpChannel::TrySend(const void* data, size_t bytes, size_t* sent) {
  *sent = 0;
  while (*sent < bytes) {
    const size_t part = Here(out_, bytes - *sent);
    const ssize_t n = ::send(streams_[out_.stream].get(), static_cast<const char*>(data) + *sent,
                             part, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && !WouldBlock(errno))
      return Result::Errno("its connection failed", errno, Code::kPeerLost);
    if (n <= 0) return {};
    *sent += static_cast<size_t>(n);
    Advance(&out_, static_cast<size_t>(n));
    if (static_cast<size_t>(n) < part) return {};
  }
  return {};
}

Result TcpChannel::Receive(void* data, size_t bytes, int flags, Place* place, size_t* received) {
  *received = 0;
  while (*received < bytes) {
    const size_t part = Here(*place, bytes - *received);
    const ssize_t n = ::recv(streams_[place->stream].get(), static_cast<char*>(data) + *received,
                             part, MSG_DONTWAIT | flags);
    if (n < 0 && !WouldBlock(errno))
      return Result::Errno("its connection failed", errno, Code::kPeerLost);
    // What has come is taken first; who asks again is told of the end.
    if (n == 0 && *received == 0) return Result::Fail(Code::kPeerLost, "it closed its connection");
    if (n <= 0) return {};
    *received += static_cast<size_t>(n);
    Advance(place, static_cast<size_t>(n));
    if (static_cast<size_t>(n) < part || streams_.size() == 1) return {};
  }
  return {};
}

Result TcpChannel::TryRecv(void* data, size_t bytes, size_t* received) {
  return Receive(data, bytes, 0, &in_, received);
}

Result TcpChannel::Peek(void* data, size_t bytes, size_t* available) {
  Place from = in_;
  return Receive(data, bytes, MSG_PEEK, &from, available);
}

int64_t TcpChannel::round_trip_us() const {
  tcp_info info{};
  socklen_t length = sizeof info;
  // A kernel that knows less of it fills less of it. Until it has measured, it says ~0.
  const bool known = ::getsockopt(streams_[0].get(), IPPROTO_TCP, TCP_INFO, &info, &length) == 0 &&
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
