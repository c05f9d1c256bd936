// The ranks that take part in a collective: all of the world, or a process set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace sparkvod {

struct Members {
  int32_t id = 0;          // 0: the world
  std::vector<int> ranks;  // of the world, ascending
  int place = -1;          // this rank's among them; -1: it is none of them

  int size() const { return static_cast<int>(ranks.size()); }
  // A rank's place among them, -1 when it is none of them.
  int PlaceOf(int rank) const {
    const auto it = std::lower_bound(ranks.begin(), ranks.end(), rank);
    return it != ranks.end() && *it == rank ? static_cast<int>(it - ranks.begin()) : -1;
  }
  // "[0,2]", for messages.
  std::string Text() const {
    std::string text = "[";
    for (const int r : ranks) text += (text.size() > 1 ? "," : "") + std::to_string(r);
    return text + "]";
  }
};

}  // namespace sparkvod
