#include "native/transport/shared/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "native/transport/poller.h"

namespace sparkvod {
namespace {

Result Duplicate(int fd, Fd* out) {
  *out = Fd(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  return out->valid() ? Result::Ok() : Result::Errno("cannot duplicate an event descriptor", errno);
}

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

Result Arena::Create(const Geometry& geometry, bool in_process, int idle_bell, int driver_bell,
                     std::shared_ptr<Arena>* out) {
  std::shared_ptr<Arena> arena(new Arena());
  SPARKVOD_TRY(Duplicate(idle_bell, &arena->idle_bell_));
  SPARKVOD_TRY(Duplicate(driver_bell, &arena->driver_bell_));
  if (!in_process) SPARKVOD_TRY(MakeMemory(geometry.total(), &arena->memory_));
  SPARKVOD_TRY(Heap::Map(geometry, arena->memory_.get(), &arena->heap_));
  *out = std::move(arena);
  return {};
}

Result Arena::Attach(const Geometry& geometry, Fd memory, Fd idle_bell, Fd driver_bell,
                     std::shared_ptr<Arena>* out) {
  std::shared_ptr<Arena> arena(new Arena());
  arena->idle_bell_ = std::move(idle_bell);
  arena->driver_bell_ = std::move(driver_bell);
  SPARKVOD_TRY(Heap::Map(geometry, memory.get(), &arena->heap_));
  *out = std::move(arena);
  return {};
}

void Arena::RingForMessage() const {
  switch (header().sleeper.load()) {
    case kIdle:
      Poller::RingFd(idle_bell_.get());
      break;
    case kForMessage:
      Poller::RingFd(driver_bell_.get());
      break;
    default:
      break;
  }
}

void Arena::RingForPhase() const {
  if (header().sleeper.load() == kForPhase) Poller::RingFd(driver_bell_.get());
}

void Arena::RingAnyway() const {
  Poller::RingFd(idle_bell_.get());
  Poller::RingFd(driver_bell_.get());
}

}  // namespace sparkvod
