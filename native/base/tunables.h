// The knobs that may change while the engine runs, on all ranks between the same two collectives.
#pragma once

#include <cstdint>
#include <vector>

#include "native/base/config.h"
#include "native/base/result.h"

namespace sparkvod {

struct Tunables {
  int64_t fusion_threshold = 0;  // bytes
  int64_t linger_us = 300;       // us
  int64_t one_shot_bytes = 0;    // bytes
  int64_t link_mbits = 0;        // 10^6 bits per second
  int64_t tcp_streams = 0;       // of those that are connected
};

struct Tunable {
  const char* name;  // of the knob; link_mbits is link_gbits in thousandths
  int64_t Tunables::* value;
  int64_t least, most;
};
constexpr Tunable kTunables[] = {
    {"fusion_threshold", &Tunables::fusion_threshold, 0, int64_t{1} << 40},
    {"linger_us", &Tunables::linger_us, 0, 1000000},
    {"one_shot_bytes", &Tunables::one_shot_bytes, 0, 128 << 10},
    {"link_mbits", &Tunables::link_mbits, 10, 100000000},
    {"tcp_streams", &Tunables::tcp_streams, 1, 64},
};

// What the knobs are before anything has changed.
Tunables TunablesOf(const Config& config);

// As they travel: one number each, in the table's order.
std::vector<int64_t> Pack(const Tunables& tunables);
// An error says which number is wrong and what was expected.
Result Unpack(const std::vector<int64_t>& numbers, Tunables* out);

}  // namespace sparkvod
