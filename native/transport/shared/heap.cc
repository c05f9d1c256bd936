#include "native/transport/shared/heap.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <string>
#include <tuple>

namespace sparkvod {
namespace {

// Blocks at least this large give their pages back when freed.
constexpr size_t kPunchBytes = 1 << 20;
// Of such blocks this much keeps its pages for the next of about the same size.
constexpr size_t kKeptBytes = 64 << 20;

}  // namespace

Result Heap::Map(const Geometry& geometry, int fd, std::shared_ptr<Heap>* out) {
  std::shared_ptr<Heap> heap(new Heap());
  const int flags = fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* base =
      ::mmap(nullptr, geometry.total(), PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED)
    return Result::Errno("cannot map " + std::to_string(geometry.total()) +
                             " bytes of engine memory (SPARKVOD_ARENA_BYTES asks for that much "
                             "address space, 'ulimit "
                             "-v' and spark.executor.pyspark.memory limit it)",
                         errno);
  heap->geometry_ = geometry;
  heap->base_ = static_cast<char*>(base);
  heap->shared_ = fd >= 0;
  // Fresh pages are zero, which is the initial value of everything in the header and the rings.
  heap->free_[geometry.heap()] = geometry.total() - geometry.heap();
  heap->touched_ = geometry.heap();
  *out = std::move(heap);
  return {};
}

Heap::~Heap() {
  if (base_ != nullptr) ::munmap(base_, geometry_.total());
}

bool Heap::Take(size_t need, size_t align, size_t* start) {
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const auto [block, size] = *it;
    *start = (block + align - 1) / align * align;
    if (*start + need > block + size) continue;
    free_.erase(it);
    if (*start > block) free_[block] = *start - block;
    if (block + size > *start + need) free_[*start + need] = block + size - *start - need;
    return true;
  }
  return false;
}

Result Heap::Allocate(size_t bytes, char** out, bool zero) {
  const auto no_room = [&] {
    return Result::Fail(Code::kSystem, "no room for " + std::to_string(bytes) +
                                           " bytes of engine memory in an arena of " +
                                           std::to_string(geometry_.heap_bytes) +
                                           " bytes; raise SPARKVOD_ARENA_BYTES, and limits of "
                                           "address space ('ulimit -v', "
                                           "spark.executor.pyspark.memory) where there are any");
  };
  if (bytes > geometry_.heap_bytes) return no_room();  // and sums below may overflow
  const size_t need =
      (bytes + kCacheLine - 1) / kCacheLine * kCacheLine + (bytes == 0 ? kCacheLine : 0);
  // Whole pages for large blocks, so that freeing them can return their pages.
  const size_t align = need >= kPunchBytes ? kPage : kCacheLine;
  size_t start = 0, size = need;
  bool dirty = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto kept = std::find_if(kept_.begin(), kept_.end(), [need](const auto& block) {
      return block.second >= need && block.second <= need + need / 4;
    });
    if (kept != kept_.end()) {
      std::tie(start, size) = *kept;
      kept_bytes_ -= size;
      kept_.erase(kept);
    } else if (!Take(need, align, &start)) {
      for (const auto& [block, held] : kept_) Return(block, held);
      kept_.clear();
      kept_bytes_ = 0;
      if (!Take(need, align, &start)) return no_room();
    }
    used_[start] = size;
    dirty = start < touched_;
    touched_ = std::max(touched_, start + size);
  }
  *out = base_ + start;
  if (dirty && zero) std::memset(*out, 0, need);
  return {};
}

void Heap::Free(char* block) {
  const size_t start = static_cast<size_t>(block - base_);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = used_.find(start);
  if (it == used_.end()) return;
  const size_t bytes = it->second;
  used_.erase(it);
  if (bytes < kPunchBytes || bytes > kKeptBytes) return Return(start, bytes);
  kept_.emplace_front(start, bytes);
  kept_bytes_ += bytes;
  while (kept_bytes_ > kKeptBytes) {
    Return(kept_.back().first, kept_.back().second);
    kept_bytes_ -= kept_.back().second;
    kept_.pop_back();
  }
}

void Heap::Return(size_t offset, size_t bytes) {
  // Private memory has no hole to punch, but forgets its pages.
  if (bytes >= kPunchBytes)
    ::madvise(base_ + offset, bytes / kPage * kPage, shared_ ? MADV_REMOVE : MADV_DONTNEED);
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

int64_t Heap::OffsetOf(const void* data, size_t bytes) const {
  const char* p = static_cast<const char*>(data);
  const char* heap = base_ + geometry_.heap();
  const char* end = base_ + geometry_.total();
  return p >= heap && p + bytes <= end ? p - base_ : -1;
}

}  // namespace sparkvod
