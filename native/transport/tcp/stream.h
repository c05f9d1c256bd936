// One TCP connection to a peer that has proved itself, encrypted or in the clear; never blocks.
#pragma once

#include <memory>
#include <utility>

#include "native/base/result.h"
#include "native/transport/fd.h"
#include "native/transport/tls/session.h"

namespace sparkvod {

class Stream {
 public:
  Stream() = default;
  // `tls`: of this socket, its handshake done; null: in the clear.
  Stream(Fd socket, std::unique_ptr<TlsSession> tls = nullptr)  // NOLINT: a socket is one
      : socket_(std::move(socket)), tls_(std::move(tls)) {}

  int fd() const { return socket_.get(); }
  bool encrypted() const { return tls_ != nullptr; }

  // They move what can be moved now and say how much that was. What was sent in part only is given
  // again from there.
  Result Send(const void* data, size_t bytes, size_t* sent);
  // The end of the peer's bytes is an error; closed() tells it from others.
  Result Recv(void* data, size_t bytes, size_t* received);
  // Copies without taking.
  Result Peek(void* data, size_t bytes, size_t* available);
  bool closed() const { return tls_ != nullptr ? tls_->closed() : closed_; }
  // Tells the peer that nothing follows.
  void End();

  // The socket alone, of a stream in the clear.
  Fd TakeSocket() { return std::move(socket_); }

 private:
  Result Receive(void* data, size_t bytes, int flags, size_t* received);

  Fd socket_;
  std::unique_ptr<TlsSession> tls_;
  bool closed_ = false;
};

}  // namespace sparkvod
