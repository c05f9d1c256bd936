#include "native/transport/shared/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "native/transport/poller.h"

namespace sparkvod {
namespace {

constexpr size_t kLeastHeap = 1 << 20;  // that is halved once more

// A memfd has no name, so a killed process leaves nothing behind, and /dev/shm may be as small as
// it likes.
Result MakeMemory(size_t bytes, Fd* out) {
  *out = Fd(::memfd_create("sparkvod", MFD_CLOEXEC));
  if (!out->valid()) return Result::Errno("memfd_create failed", errno);
  if (::ftruncate(out->get(), static_cast<off_t>(bytes)) != 0)
    return Result::Errno("shared memory of " + std::to_string(bytes) + " bytes was refused", errno);
  return {};
}

}  // namespace

Result Arena::Probe(Geometry* geometry) {
  Fd memory;
  SPARKVOD_TRY(MakeMemory(geometry->total(), &memory));
  for (;;) {
    std::shared_ptr<Heap> heap;
    // Private memory is what ranks without shared memory use; other limits hold for it.
    Result mapped = Heap::Map(*geometry, memory.get(), &heap);
    heap.reset();
    if (mapped.ok()) mapped = Heap::Map(*geometry, -1, &heap);
    if (mapped.ok() || geometry->heap_bytes < kLeastHeap) return mapped;
    geometry->heap_bytes /= 2;
  }
}

Result Arena::Create(const Geometry& geometry, bool in_process,
                     const std::shared_ptr<const Fd>& idle_bell,
                     const std::shared_ptr<const Fd>& driver_bell, std::shared_ptr<Arena>* out) {
  std::shared_ptr<Arena> arena(new Arena());
  arena->idle_bell_ = idle_bell;
  arena->driver_bell_ = driver_bell;
  if (!in_process) SPARKVOD_TRY(MakeMemory(geometry.total(), &arena->memory_));
  SPARKVOD_TRY(Heap::Map(geometry, arena->memory_.get(), &arena->heap_));
  *out = std::move(arena);
  return {};
}

Result Arena::Attach(const Geometry& geometry, Fd memory, Fd idle_bell, Fd driver_bell,
                     std::shared_ptr<Arena>* out) {
  std::shared_ptr<Arena> arena(new Arena());
  arena->idle_bell_ = std::make_shared<Fd>(std::move(idle_bell));
  arena->driver_bell_ = std::make_shared<Fd>(std::move(driver_bell));
  SPARKVOD_TRY(Heap::Map(geometry, memory.get(), &arena->heap_));
  *out = std::move(arena);
  return {};
}

void Arena::RingForMessage() const {
  switch (header().sleeper.load()) {
    case kIdle:
      Poller::RingFd(idle_bell_->get());
      break;
    case kForMessage:
      Poller::RingFd(driver_bell_->get());
      break;
    default:
      break;
  }
}

void Arena::RingForPhase() const {
  if (header().sleeper.load() == kForPhase) Poller::RingFd(driver_bell_->get());
}

void Arena::RingAnyway() const {
  Poller::RingFd(idle_bell_->get());
  Poller::RingFd(driver_bell_->get());
}

}  // namespace sparkvod
