// What sparkvod_bench can measure. Each returns the seconds of every call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "benchmarks/native/ranks.h"

namespace sparkvod::bench {

// The machine's limit of an allreduce of float32 of two ranks: in memory that both see, or from
// memory of their own through shared chunks of `chunk_bytes`.
std::vector<double> LimitInPlace(size_t bytes, int calls);
std::vector<double> LimitStaged(size_t bytes, int calls, size_t chunk_bytes);

// The engine's allreduce, negotiated, with no Python around it: in engine memory, or in memory of
// the ranks' own.
std::vector<double> Path(int size, size_t bytes, int calls, bool engine_memory);

// Negotiation of cached tensors without elements by `size` ranks that are threads of this process,
// in several worlds at once.
struct Negotiated {
  std::vector<double> seconds;               // for all tensors, per call
  std::vector<double> cpu_seconds_per_rank;  // of this process's threads, per call
};
Negotiated Negotiate(int size, int worlds, int tensors, int calls);

// Joins two network namespaces by an interface in each, until standard input is closed; prints
// "ready" when they are there.
void Cable(const std::vector<std::string>& namespaces, const std::string& interface,
           int64_t delay_us, int64_t megabits);

}  // namespace sparkvod::bench
