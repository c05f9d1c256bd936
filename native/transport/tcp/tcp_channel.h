// Channel and Link over TCP connections between a pair of ranks: one or several carry the bytes of
// cycles and collectives, another nothing but good-byes, so that a cause can be told even in the
// middle of a transfer.
//
// Several streams take the bytes in turn, kBlockBytes each, so both ends know where each byte goes
// without a word about it. While one stream's block is on its way, so are the blocks of the others:
// together they carry what no single connection may (a limit per flow, a window too small for the
// delay, a loss that halves it).
#pragma once

#include <memory>
#include <vector>

#include "native/transport/channel.h"
#include "native/transport/tcp/stream.h"

namespace sparkvod {

class TcpChannel : public Channel {
 public:
  static constexpr size_t kBlockBytes = 128 << 10;

  // At least one; in the same order at both ends.
  explicit TcpChannel(std::vector<Stream> streams);
  const char* transport() const override { return streams_[0].encrypted() ? "tls" : "tcp"; }
  const std::vector<Stream>& connections() const { return streams_; }
  Result TrySend(const void* data, size_t bytes, size_t* sent) override;
  Result TryRecv(void* data, size_t bytes, size_t* received) override;
  Result Peek(void* data, size_t bytes, size_t* available) override;
  int64_t round_trip_us() const override;  // as the kernel has measured it; at least 1
  int streams() const override { return static_cast<int>(streams_.size()); }
  void UseStreams(int streams) override;

 private:
  // Where the next byte goes, or comes from.
  struct Place {
    size_t stream = 0;
    size_t left = kBlockBytes;  // of the block
  };
  // How many of `bytes` go over the place's stream before it is the next one's turn.
  size_t Here(const Place& place, size_t bytes) const;
  void Advance(Place* place, size_t bytes) const;
  using Take = Result (Stream::*)(void* data, size_t bytes, size_t* received);
  Result Receive(void* data, size_t bytes, Take take, Place* place, size_t* received);

  std::vector<Stream> streams_;
  size_t used_;  // the first so many of them
  Place out_, in_;
};

class TcpLink : public Link {
 public:
  explicit TcpLink(Stream stream) : stream_(std::move(stream)) {}
  int fd() const override { return stream_.fd(); }
  bool Left(Departure* how) override;
  void Leave(const Departure& how) override;

 private:
  Stream stream_;
  std::string heard_;
};

}  // namespace sparkvod
