// Channel and Link between two ranks of one host: two byte rings and two arena headers. How the
// arenas came to be visible on both sides (a memfd, or the same process) is inproc's and shm's
// business.
#pragma once

#include <memory>

#include "native/transport/channel.h"
#include "native/transport/shared/arena.h"

namespace sparkvod {

class RingChannel : public Channel {
 public:
  RingChannel(const char* transport, std::shared_ptr<Arena> own, int own_local,
              std::shared_ptr<Arena> peer, int peer_local)
      : transport_(transport),
        own_(std::move(own)),
        peer_(std::move(peer)),
        in_(own_->ring(peer_local)),
        out_(peer_->ring(own_local)) {}

  const char* transport() const override { return transport_; }
  Result TrySend(const void* data, size_t bytes, size_t* sent) override;
  Result TryRecv(void* data, size_t bytes, size_t* received) override;
  Result Peek(void* data, size_t bytes, size_t* available) override;

 private:
  const char* transport_;
  std::shared_ptr<Arena> own_, peer_;
  ByteRing& in_;
  ByteRing& out_;
  uint64_t sent_ = 0, received_ = 0;  // this side's copies of out_.head and in_.tail
  // Of out_.tail when there was last too little room: until then it need not be fetched from the
  // other core.
  uint64_t tail_ = 0;
};

class ArenaLink : public Link {
 public:
  // `socket` stays open for as long as the peer lives; without one (same process) only the header
  // tells.
  ArenaLink(std::shared_ptr<Arena> own, std::shared_ptr<Arena> peer, Fd socket)
      : own_(std::move(own)), peer_(std::move(peer)), socket_(std::move(socket)) {}

  int fd() const override { return socket_.get(); }
  bool Left(Departure* how) override;
  void Leave(const Departure& how) override;
  // Leaves the story, if there is none yet, to all that have attached this rank's arena.
  static void Tell(const Departure& how, ArenaHeader* own);

 private:
  std::shared_ptr<Arena> own_, peer_;
  Fd socket_;
};

}  // namespace sparkvod
