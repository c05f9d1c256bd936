#include "native/base/tunables.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>

namespace sparkvod {

Tunables TunablesOf(const Config& config) {
  Tunables tunables;
  tunables.fusion_threshold = config.fusion_threshold;
  tunables.linger_us = config.linger_us;
  tunables.one_shot_bytes = config.one_shot_bytes;
  tunables.link_mbits = std::max<int64_t>(std::llround(config.link_gbits * 1000), 10);
  tunables.tcp_streams = config.tcp_streams;
  return tunables;
}

std::vector<int64_t> Pack(const Tunables& tunables) {
  std::vector<int64_t> numbers;
  for (const Tunable& t : kTunables) numbers.push_back(tunables.*t.value);
  return numbers;
}

Result Unpack(const std::vector<int64_t>& numbers, Tunables* out) {
  constexpr size_t kCount = std::size(kTunables);
  if (numbers.size() != kCount)
    return Result::Fail(Code::kInvalid, std::to_string(numbers.size()) +
                                            " values to tune were found, " +
                                            std::to_string(kCount) + " were expected");
  for (size_t i = 0; i < kCount; ++i) {
    const Tunable& t = kTunables[i];
    if (numbers[i] < t.least || numbers[i] > t.most)
      return Result::Fail(Code::kInvalid, std::string(t.name) + "=" + std::to_string(numbers[i]) +
                                              " was found, a value from " +
                                              std::to_string(t.least) + " to " +
                                              std::to_string(t.most) + " was expected");
    out->*t.value = numbers[i];
  }
  return {};
}

}  // namespace sparkvod
