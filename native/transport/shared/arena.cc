#include "native/transport/shared/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>

#include "native/transport/poller.h"

namespace sparkvod {
namespace {

// Blocks at least this large give their pages back when freed.
constexpr size_t kPunchBytes = 1 << 20;

Result Duplicate(int fd, Fd* out) {
  *out = Fd(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  return out->valid() ? Result::Ok() : Result::Errno("cannot duplicate an event descriptor", errno);
}

Result Map(size_t bytes, int fd, char** out) {
  const int flags = fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED)
    return Result::Errno(
        "cannot map " + std::to_string(bytes) +
            " bytes of shared memory (SPARKVOD_ARENA_BYTES sets the address space asked for)",
        errno);
  *out = static_cast<char*>(base);
  return {};
}

}  // namespace

Result Arena::Create(const Geometry& geometry, bool in_process, int idle_bell, int driver_bell,
                     std::shared_ptr<Arena>* out) {
  std::shared_ptr<Arena> arena(new Arena());
  arena->geometry_ = geometry;
  arena->shared_ = !in_process;
  SPARKVOD_TRY(Duplicate(idle_bell, &arena->idle_bell_));
  SPARKVOD_TRY(Duplicate(driver_bell, &arena->driver_bell_));
  if (!in_process) {
    // A memfd has no name, so a killed process leaves nothing behind, and /dev/shm may be as small
    // as it likes.
    arena->memory_ = Fd(::memfd_create("sparkvod", MFD_CLOEXEC));
    if (!arena->memory_.valid()) return Result::Errno("memfd_create failed", errno);
    if (::ftruncate(arena->memory_.get(), static_cast<off_t>(geometry.total())) != 0)
      return Result::Errno("cannot size the shared memory", errno);
  }
  SPARKVOD_TRY(Map(geometry.total(), arena->memory_.get(), &arena->base_));
  // Fresh pages are zero, which is the initial value of everything in the header and the rings.
  arena->free_[geometry.heap()] = geometry.total() - geometry.heap();
  arena->touched_ = geometry.heap();
  *out = std::move(arena);
  return {};
}

Result Arena::Attach(const Geometry& geometry, Fd memory, Fd idle_bell, Fd driver_bell,
                     std::shared_ptr<Arena>* out) {
  std::shared_ptr<Arena> arena(new Arena());
  arena->geometry_ = geometry;
  arena->idle_bell_ = std::move(idle_bell);
  arena->driver_bell_ = std::move(driver_bell);
  SPARKVOD_TRY(Map(geometry.total(), memory.get(), &arena->base_));
  *out = std::move(arena);
  return {};
}

Arena::~Arena() {
  if (base_ != nullptr) ::munmap(base_, geometry_.total());
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

Result Arena::Allocate(size_t bytes, char** out) {
  const size_t need =
      (bytes + kCacheLine - 1) / kCacheLine * kCacheLine + (bytes == 0 ? kCacheLine : 0);
  // Whole pages for large blocks, so that freeing them can return their pages.
  const size_t align = need >= kPunchBytes ? kPage : kCacheLine;
  size_t start = 0;
  bool dirty = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = free_.begin();
    for (; it != free_.end(); ++it) {
      start = (it->first + align - 1) / align * align;
      if (start + need <= it->first + it->second) break;
    }
    if (it == free_.end())
      return Result::Fail(Code::kSystem, "no room for " + std::to_string(bytes) +
                                             " bytes of engine memory in an arena of " +
                                             std::to_string(geometry_.heap_bytes) +
                                             " bytes; raise SPARKVOD_ARENA_BYTES");
    const auto [block, size] = *it;
    free_.erase(it);
    if (start > block) free_[block] = start - block;
    if (block + size > start + need) free_[start + need] = block + size - start - need;
    used_[start] = need;
    dirty = start < touched_;
    touched_ = std::max(touched_, start + need);
  }
  *out = base_ + start;
  if (dirty) std::memset(*out, 0, need);
  return {};
}

void Arena::Free(char* block) {
  const size_t start = static_cast<size_t>(block - base_);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = used_.find(start);
  if (it == used_.end()) return;
  size_t offset = start, bytes = it->second;
  used_.erase(it);
  if (bytes >= kPunchBytes) {
    // Private memory has no hole to punch, but forgets its pages.
    ::madvise(block, bytes / kPage * kPage, shared_ ? MADV_REMOVE : MADV_DONTNEED);
  }
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_[offset] = bytes;
}

int64_t Arena::OffsetOf(const void* data, size_t bytes) const {
  const char* p = static_cast<const char*>(data);
  const char* heap = base_ + geometry_.heap();
  const char* end = base_ + geometry_.total();
  return p >= heap && p + bytes <= end ? p - base_ : -1;
}

}  // namespace sparkvod
