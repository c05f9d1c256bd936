#include "native/transport/tcp/tcp_channel.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>

#include "native/transport/socket.h"

namespace sparkvod {
namespace {

// Whether that is how a connection fails whose probes nobody answers.
bool IsSilence(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
}

}  // namespace

TcpChannel::TcpChannel(std::vector<Stream> streams)
    : streams_(std::move(streams)), used_(streams_.size()) {
  for (const Stream& stream : streams_) TuneTcp(stream.fd());
}

void TcpChannel::UseStreams(int streams) {
  used_ = std::min(static_cast<size_t>(std::max(streams, 1)), streams_.size());
  out_ = in_ = Place{};
}

size_t TcpChannel::Here(const Place& place, size_t bytes) const {
  return used_ == 1 ? bytes : std::min(bytes, place.left);
}

void TcpChannel::Advance(Place* place, size_t bytes) const {
  if (used_ == 1) return;
  place->left -= bytes;
  if (place->left > 0) return;
  place->left = kBlockBytes;
  place->stream = (place->stream + 1) % used_;
}

Result TcpChannel::TrySend(const void* data, size_t bytes, size_t* sent) {
  *sent = 0;
  while (*sent < bytes) {
    const size_t part = Here(out_, bytes - *sent);
    size_t n = 0;
    SPARKVOD_TRY(streams_[out_.stream].Send(static_cast<const char*>(data) + *sent, part, &n));
    *sent += n;
    Advance(&out_, n);
    if (n < part) return {};
  }
  return {};
}

Result TcpChannel::Receive(void* data, size_t bytes, Take take, Place* place, size_t* received) {
  *received = 0;
  while (*received < bytes) {
    const size_t part = Here(*place, bytes - *received);
    size_t n = 0;
    const Result result =
        (streams_[place->stream].*take)(static_cast<char*>(data) + *received, part, &n);
    // What has come is taken first; who asks again is told of the end.
    if (!result.ok()) return *received == 0 ? result : Result::Ok();
    *received += n;
    Advance(place, n);
    if (n < part) return {};
  }
  return {};
}

Result TcpChannel::TryRecv(void* data, size_t bytes, size_t* received) {
  return Receive(data, bytes, &Stream::Recv, &in_, received);
}

Result TcpChannel::Peek(void* data, size_t bytes, size_t* available) {
  Place from = in_;
  return Receive(data, bytes, &Stream::Peek, &from, available);
}

int64_t TcpChannel::round_trip_us() const {
  tcp_info info{};
  socklen_t length = sizeof info;
  // A kernel that knows less of it fills less of it. Until it has measured, it says ~0.
  const bool known = ::getsockopt(streams_[0].fd(), IPPROTO_TCP, TCP_INFO, &info, &length) == 0 &&
                     length >= offsetof(tcp_info, tcpi_min_rtt) + sizeof info.tcpi_min_rtt &&
                     info.tcpi_min_rtt != ~uint32_t{0};
  return known ? std::max<int64_t>(info.tcpi_min_rtt, 1) : 1;
}

bool TcpLink::Left(Departure* how) {
  char buffer[kCauseLimit + 16];
  while (heard_.size() <= 4 * kCauseLimit) {
    size_t n = 0;
    const Result result = stream_.Recv(buffer, sizeof buffer, &n);
    heard_.append(buffer, n);
    if (n > 0) continue;
    if (!heard_.empty()) return Decode(heard_, !result.ok(), how);
    if (result.ok()) return false;
    *how = Departure{};
    how->cause = stream_.closed() ? "its process ended or its host closed the connection"
                 : IsSilence(result.error())
                     ? "its host or the network is gone, nothing has answered for the time of "
                       "SPARKVOD_HOST_TIMEOUT (" +
                           result.Report() + ")"
                     : result.Report();
    return true;
  }
  return Decode(heard_, true, how);
}

void TcpLink::Leave(const Departure& how) {
  // The connection has carried nothing so far, so its buffer takes the whole message; a dead peer
  // needs none.
  const std::string story = Encode(how);
  size_t sent = 0;
  (void)!stream_.Send(story.data(), story.size(), &sent).ok();
  stream_.End();
}

}  // namespace sparkvod
