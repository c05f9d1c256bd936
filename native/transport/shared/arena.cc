#include "native/transport/shared/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "native/transport/poller.h"

namespace sparkvod {
namespace {

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

Result Arena::Probe(size_t bytes) {
  Fd memory;
  return MakeMemory(bytes, &memory);
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
