// What lies in an arena: the memory that a rank shares with the other ranks of its host.
//
//   header | ring 0 | ring 1 | ... one per local rank | notices | one-shot slots | staging | heap
//
// Every rank of a host computes the same geometry, so a place is (local rank, offset).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace sparkvod {

constexpr size_t kPage = 4096;
constexpr size_t kCacheLine = 64;

// Who of a rank sleeps, and for what: peers ring only whom their news concerns.
enum Sleeper : uint32_t {
  kAwake = 0,
  kIdle = 1,        // nobody drives; the background thread waits for any message
  kForMessage = 2,  // the driver waits for a message, or for room in a ring
  kForPhase = 3,    // the driver waits for the phases of a direct collective
};

struct ArenaHeader {
  alignas(kCacheLine) std::atomic<uint32_t> sleeper;
  std::atomic<uint32_t> waits_for;  // 1 + the rank for which the driver has slept a while; 0: none
  std::atomic<uint32_t> core;       // 1 + the core on which the driver waited last; 0: none yet
  alignas(kCacheLine)
      std::atomic<uint64_t> phase;  // steps of direct collectives that this rank has done
  // How many of the other ranks have left: what each adds one to in all headers but its own, so
  // that this rank has but one place to look at.
  alignas(kCacheLine) std::atomic<uint32_t> departures;
  alignas(kCacheLine) std::atomic<uint32_t> left;  // 1 when the story below is complete
  uint32_t orderly;
  uint32_t relayed;
  uint32_t code;
  char cause[1024];
};

// A single-producer, single-consumer ring of bytes: head is the sender's, tail the receiver's.
struct ByteRing {
  static constexpr size_t kBytes = 256 << 10;
  alignas(kCacheLine) std::atomic<uint64_t> head;
  alignas(kCacheLine) std::atomic<uint64_t> tail;
  alignas(kCacheLine) std::atomic<uint32_t> blocked;  // 1: the sender waits for room
  alignas(kCacheLine) char data[kBytes];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "atomics must work between processes");

struct Geometry {
  // Bytes of one of the two slots through which small collectives pass.
  static constexpr size_t kSlotBytes = 128 << 10;
  // Bytes of one of the two notices of a rank, with the data that goes with it.
  static constexpr size_t kNoticeBytes = 128 << 10;

  int local_size = 1;
  size_t staging_bytes = 0;
  size_t heap_bytes = 0;

  static size_t RoundUp(size_t n) { return (n + kPage - 1) / kPage * kPage; }
  size_t rings() const { return RoundUp(sizeof(ArenaHeader)); }
  size_t ring_stride() const { return RoundUp(sizeof(ByteRing)); }
  size_t notices() const { return rings() + ring_stride() * static_cast<size_t>(local_size); }
  size_t slots() const { return notices() + 2 * kNoticeBytes; }
  size_t staging() const { return slots() + 2 * kSlotBytes; }
  size_t heap() const { return staging() + RoundUp(staging_bytes); }
  size_t total() const { return heap() + RoundUp(heap_bytes); }
};

}  // namespace sparkvod
