// A rank's shared memory: its own (created, with the heap's allocator) and its peers' (attached).
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "native/base/result.h"
#include "native/transport/fd.h"
#include "native/transport/shared/layout.h"

namespace sparkvod {

class Arena {
 public:
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Creates the own arena: a memfd that other processes can attach, or, with `in_process`, plain
  // memory. The bells are the event descriptors of the rank's pollers (idle, driver); the arena
  // keeps duplicates.
  static Result Create(const Geometry& geometry, bool in_process, int idle_bell, int driver_bell,
                       std::shared_ptr<Arena>* out);
  // Maps a peer's arena from the descriptors that it sent.
  static Result Attach(const Geometry& geometry, Fd memory, Fd idle_bell, Fd driver_bell,
                       std::shared_ptr<Arena>* out);

  const Geometry& geometry() const { return geometry_; }
  char* base() const { return base_; }
  ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(base_); }
  ByteRing& ring(int local_rank) const {
    return *reinterpret_cast<ByteRing*>(base_ + geometry_.rings() +
                                        geometry_.ring_stride() * static_cast<size_t>(local_rank));
  }
  char* slot(int parity) const {
    return base_ + geometry_.slots() + Geometry::kSlotBytes * static_cast<size_t>(parity);
  }
  char* staging() const { return base_ + geometry_.staging(); }
  int memory_fd() const { return memory_.get(); }
  // Once every peer has mapped the memory nobody needs its descriptor.
  void CloseMemoryFd() { memory_.Close(); }
  int idle_bell() const { return idle_bell_.get(); }
  int driver_bell() const { return driver_bell_.get(); }

  // Rings whoever of this arena's rank sleeps for a message; call after the message is visible
  // (seq_cst).
  void RingForMessage() const;
  // Rings the rank when its driver sleeps for a phase.
  void RingForPhase() const;
  // Rings whoever sleeps, for whatever.
  void RingAnyway() const;

  // Heap of the own arena: blocks are zeroed and start on a cache line. Thread-safe.
  Result Allocate(size_t bytes, char** out);
  void Free(char* block);
  // Offset from the base of a range that lies in the heap, else -1.
  int64_t OffsetOf(const void* data, size_t bytes) const;

 private:
  Arena() = default;

  Geometry geometry_;
  char* base_ = nullptr;
  bool shared_ = false;
  Fd memory_, idle_bell_, driver_bell_;
  std::mutex mutex_;
  std::map<size_t, size_t> free_;  // offset -> bytes
  std::map<size_t, size_t> used_;
  size_t touched_ = 0;  // blocks beyond this offset were never handed out, so they are zero
};

}  // namespace sparkvod
