// What this machine itself allows: the least that a sum of two ranks' buffers has to do, with
// spinning between the steps and nothing else. Each rank has just written its whole buffer, as a
// training step has its gradients, so half of what is summed lies in the other core's caches.
#include <algorithm>
#include <cstring>
#include <vector>

#include "benchmarks/native/modes.h"

namespace sparkvod::bench {
namespace {

constexpr size_t kRanks = 2;

// first[i] = second[i] = a[i] + b[i]; first may be a, second b.
__attribute__((noinline)) void SumToBoth(float* first, float* second, const float* a,
                                         const float* b, size_t count) {
  // Places that are the same are read and written by the same iteration.
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) {
    const float sum = a[i] + b[i];
    first[i] = sum;
    second[i] = sum;
  }
}

void Fill(float* buffer, size_t count, int rank) {
  std::fill_n(buffer, count, static_cast<float>(rank + 1));
}

// Where rank r's half begins: at a whole cache line.
size_t HalfBegin(size_t count, size_t r) {
  return r == 0 ? 0 : r == 1 ? count / 2 / 16 * 16 : count;
}

}  // namespace

// Both buffers lie in shared memory; each rank sums its half where it lies.
std::vector<double> LimitInPlace(size_t bytes, int calls) {
  const size_t count = bytes / sizeof(float);
  float* buffers[kRanks];
  for (float*& buffer : buffers) buffer = reinterpret_cast<float*>(SharedMemory(bytes));
  Ranks ranks(kRanks, calls);
  return ranks.Run(true, [&](int rank) {
    const auto me = static_cast<size_t>(rank);
    const size_t begin = HalfBegin(count, me), end = HalfBegin(count, me + 1);
    float *const a = buffers[0] + begin, *const b = buffers[1] + begin;
    ranks.Measure(
        rank, [&] { Fill(buffers[me], count, rank); },
        [&] {
          SumToBoth(a, b, a, b, end - begin);
          ranks.Barrier(rank);
        });
    Expect(buffers[me], count, 3, "in-place limit");
  });
}

// The buffers are the ranks' own; what the other rank reduces passes through shared memory, in
// chunks of a size that keeps it in the caches: publish, barrier, sum into the own buffer and into
// shared memory, barrier, copy.
std::vector<double> LimitStaged(size_t bytes, int calls, size_t chunk_bytes) {
  const size_t count = bytes / sizeof(float);
  const size_t chunk = std::min(count, chunk_bytes / sizeof(float));
  float *published[kRanks], *summed[kRanks];
  for (size_t r = 0; r < kRanks; ++r) {
    published[r] = reinterpret_cast<float*>(SharedMemory(chunk * sizeof(float)));
    summed[r] = reinterpret_cast<float*>(SharedMemory(chunk * sizeof(float)));
  }
  Ranks ranks(kRanks, calls);
  return ranks.Run(true, [&](int rank) {
    const auto me = static_cast<size_t>(rank), other = 1 - me;
    auto* const buffer = reinterpret_cast<float*>(PrivateMemory(bytes));
    ranks.Measure(
        rank, [&] { Fill(buffer, count, rank); },
        [&] {
          for (size_t at = 0; at < count; at += chunk) {
            const size_t length = std::min(chunk, count - at);
            float* const mine = buffer + at + HalfBegin(length, me);
            float* const theirs = buffer + at + HalfBegin(length, other);
            const size_t own = HalfBegin(length, me + 1) - HalfBegin(length, me);
            const size_t given = length - own;
            std::memcpy(published[me], theirs, given * sizeof(float));
            ranks.Barrier(rank);
            SumToBoth(mine, summed[me], mine, published[other], own);
            ranks.Barrier(rank);
            std::memcpy(theirs, summed[other], given * sizeof(float));
          }
        });
    Expect(buffer, count, 3, "staged limit");
  });
}

}  // namespace sparkvod::bench
