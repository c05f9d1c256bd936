// An ordered, reliable stream of bytes between this rank and one peer.
//
// Laws, checked by the one contract suite (tests/native/transport/contract_test.cc):
//   1. Bytes arrive complete, once, in the order in which they were sent.
//   2. TrySend and TryRecv never block; they move what can be moved now and say how much that was.
//   Zero is no error.
//   3. After either moved nothing, the driver's poller wakes when it may be tried again. A peer's
//   death is not the
//      channel's business on shared memory (its Link tells); on TCP it is an error of the call as
//      well.
//   4. Both are called by the holder of the engine's driver token only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/base/result.h"
#include "native/transport/departure.h"

namespace sparkvod {

class Channel {
 public:
  virtual ~Channel() = default;
  // Name of the transport: "inproc", "shm", "tcp" or, encrypted, "tls".
  virtual const char* transport() const = 0;
  virtual Result TrySend(const void* data, size_t bytes, size_t* sent) = 0;
  virtual Result TryRecv(void* data, size_t bytes, size_t* received) = 0;
  // Copies up to `bytes` of what has arrived without consuming it.
  virtual Result Peek(void* data, size_t bytes, size_t* available) = 0;
  // The shortest time, in microseconds, that a message and its answer have taken; 0 where the ends
  // share memory.
  virtual int64_t round_trip_us() const { return 0; }
  // Connections over which the bytes may go in turn, and from now on go: between the same two bytes
  // at both ends.
  virtual int streams() const { return 1; }
  virtual void UseStreams(int) {}
};

// What is known about a peer beside its bytes: that it lives, or why it left.
class Link {
 public:
  virtual ~Link() = default;
  // Descriptor that becomes readable when there may be news; -1 when news come with the doorbell.
  virtual int fd() const = 0;
  // True, with the story, when the peer has left.
  virtual bool Left(Departure* how) = 0;
  // Tells the peer that this rank leaves. Never blocks; called at most once.
  virtual void Leave(const Departure& how) = 0;
};

}  // namespace sparkvod
