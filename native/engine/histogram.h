// Counts by powers of two.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace sparkvod {

struct Histogram {
  // Bucket k counts values above 2^(k-1) and up to 2^k, the first those up to 1, the last all
  // above.
  static constexpr size_t kBuckets = 40;
  std::array<uint64_t, kBuckets> counts{};

  void Add(uint64_t value) {
    const size_t k = value <= 1 ? 0 : 64 - static_cast<size_t>(__builtin_clzll(value - 1));
    ++counts[k < kBuckets ? k : kBuckets - 1];
  }
};

}  // namespace sparkvod
