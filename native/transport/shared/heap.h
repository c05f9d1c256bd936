// The mapping of an arena, and the allocator of its heap. It lives as long as anybody holds a block
// of it, which may be longer than the engine; it owns no descriptor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

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

  // Blocks are zeroed and start on a cache line. Thread-safe; for the rank that owns the arena.
  Result Allocate(size_t bytes, char** out);
  void Free(char* block);
  // Offset from the base of a range that lies in the heap, else -1.
  int64_t OffsetOf(const void* data, size_t bytes) const;

 private:
  Heap() = default;

  Geometry geometry_;
  char* base_ = nullptr;
  bool shared_ = false;
  std::mutex mutex_;
  std::map<size_t, size_t> free_;  // offset -> bytes
  std::map<size_t, size_t> used_;
  size_t touched_ = 0;  // blocks beyond this offset were never handed out, so they are zero
};

}  // namespace sparkvod
