// The mapping of an arena, and the allocator of its heap. It lives as long as anybody holds a block
// of it, which may be longer than the engine; it owns no descriptor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "native/base/result.h"
#include "native/transport/shared/layout.h"

namespace sparkvod {

class Heap {
 public:
  ~Heap();
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  // Maps `fd`, or, for -1, private memory.
  static Result Map(const Geometry& geometry, int fd, std::shared_ptr<Heap>* out);

  char* base() const { return base_; }
  const Geometry& geometry() const { return geometry_; }

  // Blocks start on a cache line, and are zero unless `zero` is false. Thread-safe; for the rank
  // that owns the arena.
  Result Allocate(size_t bytes, char** out, bool zero = true);
  void Free(char* block);
  // Offset from the base of a range that lies in the heap, else -1.
  int64_t OffsetOf(const void* data, size_t bytes) const;

 private:
  Heap() = default;

  // With mutex_ held: where a block of `need` bytes may begin, taken out of what is free.
  bool Take(size_t need, size_t align, size_t* start);
  // Gives a block back to what is free, a large one's pages to the system.
  void Return(size_t start, size_t bytes);

  Geometry geometry_;
  char* base_ = nullptr;
  bool shared_ = false;
  std::mutex mutex_;
  std::map<size_t, size_t> free_;  // offset -> bytes
  std::map<size_t, size_t> used_;
  // Large blocks freed last, whole and with their pages: a collective's output is as large each
  // step, and its pages cost more than the collective. Newest first.
  std::deque<std::pair<size_t, size_t>> kept_;
  size_t kept_bytes_ = 0;
  size_t touched_ = 0;  // blocks beyond this offset were never handed out, so they are zero
};

}  // namespace sparkvod
