// Counters of one engine; a snapshot is what the bindings show.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "native/engine/histogram.h"

namespace sparkvod {

struct Stats {
  struct Carried {
    uint64_t calls = 0;
    uint64_t tensors = 0;
    uint64_t bytes = 0;
    int64_t ns = 0;             // of executing it, without negotiation
    Histogram by_microseconds;  // calls by how long they took
    Histogram by_bytes;         // calls by how much they carried
  };
  // From being submitted to being done.
  struct Latency {
    uint64_t count = 0;
    int64_t ns = 0;
    Histogram by_microseconds;
  };
  // "allreduce/shm/in-place" -> what went that way.
  std::map<std::string, Carried> collectives;
  std::map<std::string, Latency> latencies;  // by collective
  uint64_t in_flight = 0;                    // submitted and not done
  uint64_t cycles = 0;                       // negotiations
  uint64_t cache_hits = 0;                   // requests that were one bit
  uint64_t cache_misses = 0;                 // requests that travelled in full
  uint64_t sleeps = 0;                       // of drivers within cycles
  uint64_t idle_wakes = 0;                   // of the background thread
};

}  // namespace sparkvod
