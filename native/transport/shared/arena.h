// A rank's shared memory: its own (created, with the heap's allocator) and its peers' (attached).
#pragma once

#include <memory>

#include "native/base/result.h"
#include "native/transport/fd.h"
#include "native/transport/shared/heap.h"

namespace sparkvod {

class Arena {
 public:
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Whether this process can make and map such memory: sandboxes forbid memfd_create, limits of
  // file sizes (ulimit -f) hold for it too. Where the mapping is refused, the heap is halved until
  // it is not.
  static Result Probe(Geometry* geometry);
  // Creates the own arena: a memfd that other processes can attach, or, with `in_process`, plain
  // memory. The bells are the event descriptors of the rank's pollers (idle, driver), which the
  // arena and all threads of this process that have it share.
  static Result Create(const Geometry& geometry, bool in_process,
                       const std::shared_ptr<const Fd>& idle_bell,
                       const std::shared_ptr<const Fd>& driver_bell, std::shared_ptr<Arena>* out);
  // Maps a peer's arena from the descriptors that it sent.
  static Result Attach(const Geometry& geometry, Fd memory, Fd idle_bell, Fd driver_bell,
                       std::shared_ptr<Arena>* out);

  const Geometry& geometry() const { return heap_->geometry(); }
  char* base() const { return heap_->base(); }
  ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(base()); }
  ByteRing& ring(int local_rank) const {
    return *reinterpret_cast<ByteRing*>(base() + geometry().rings() +
                                        geometry().ring_stride() * static_cast<size_t>(local_rank));
  }
  char* notice(int parity) const {
    return base() + geometry().notices() + Geometry::kNoticeBytes * static_cast<size_t>(parity);
  }
  char* slot(int parity) const {
    return base() + geometry().slots() + Geometry::kSlotBytes * static_cast<size_t>(parity);
  }
  char* staging() const { return base() + geometry().staging(); }
  int memory_fd() const { return memory_.get(); }
  // Once every peer has mapped the memory nobody needs its descriptor.
  void CloseMemoryFd() { memory_.Close(); }
  int idle_bell() const { return idle_bell_->get(); }
  int driver_bell() const { return driver_bell_->get(); }

  // Rings whoever of this arena's rank sleeps for a message; call after the message is visible
  // (seq_cst).
  void RingForMessage() const;
  // Rings the rank when its driver sleeps for a phase.
  void RingForPhase() const;
  // Rings whoever sleeps, for whatever.
  void RingAnyway() const;

  // The mapping and, for the own arena, its allocator.
  const std::shared_ptr<Heap>& heap() const { return heap_; }

 private:
  Arena() = default;

  std::shared_ptr<Heap> heap_;
  Fd memory_;
  std::shared_ptr<const Fd> idle_bell_, driver_bell_;
};

}  // namespace sparkvod
