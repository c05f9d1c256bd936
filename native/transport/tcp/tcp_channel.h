// Channel and Link over two TCP connections between a pair of ranks: one carries the bytes of
// cycles and collectives, the other nothing but good-byes, so that a cause can be told even in the
// middle of a transfer.
#pragma once

#include <memory>

#include "native/transport/channel.h"
#include "native/transport/fd.h"

namespace sparkvod {

class TcpChannel : public Channel {
 public:
  explicit TcpChannel(Fd socket);
  const char* transport() const override { return "tcp"; }
  int fd() const { return socket_.get(); }
  Result TrySend(const void* data, size_t bytes, size_t* sent) override;
  Result TryRecv(void* data, size_t bytes, size_t* received) override;
  Result Peek(void* data, size_t bytes, size_t* available) override;
  int64_t round_trip_us() const override;  // as the kernel has measured it; at least 1

 private:
  Result Receive(void* data, size_t bytes, int flags, size_t* received);
  Fd socket_;
};

class TcpLink : public Link {
 public:
  explicit TcpLink(Fd socket) : socket_(std::move(socket)) {}
  int fd() const override { return socket_.get(); }
  bool Left(Departure* how) override;
  void Leave(const Departure& how) override;

 private:
  Fd socket_;
  std::string heard_;
};

}  // namespace sparkvod
