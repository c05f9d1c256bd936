// What ranks give to sums whose results are known.
#pragma once

#include <cstddef>
#include <vector>

namespace sparkvod::check {

// What a rank contributes at i: small, and other for each rank, so that sums of a few of any order
// are exact.
inline float Term(int rank, size_t i) {
  return static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13) % 101);
}

inline std::vector<float> Terms(int rank, size_t count) {
  std::vector<float> terms(count);
  for (size_t i = 0; i < count; ++i) terms[i] = Term(rank, i);
  return terms;
}

}  // namespace sparkvod::check
