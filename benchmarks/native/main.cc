// sparkvod_bench limit in-place|staged BYTES CALLS
// sparkvod_bench path engine|ordinary RANKS BYTES CALLS
// sparkvod_bench negotiate RANKS WORLDS TENSORS CALLS
// sparkvod_bench cable NAMESPACE NAMESPACE INTERFACE DELAY_US MEGABITS
//
// Prints one JSON object: the median of the calls in seconds, and what else the mode tells.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "benchmarks/native/modes.h"

namespace sparkvod::bench {
namespace {

double Median(std::vector<double> values) {
  if (values.empty()) Fail("nothing was measured");
  const size_t middle = values.size() / 2;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(middle),
                   values.end());
  return values[middle];
}

size_t Number(const std::string& text) {
  char* end = nullptr;
  const unsigned long long number = std::strtoull(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || number == 0) Fail("'" + text + "' is no positive number");
  return number;
}

// The chunk with which this machine is fastest, found here and now.
double BestStaged(size_t bytes, int calls) {
  double best = 0;
  const size_t chunks[] = {size_t{32} << 10, size_t{128} << 10, size_t{512} << 10, bytes};
  for (const size_t chunk : chunks) {
    if (chunk > bytes) continue;
    const double median = Median(LimitStaged(bytes, calls, chunk));
    if (best == 0 || median < best) best = median;
  }
  return best;
}

int Main(const std::vector<std::string>& arguments) {
  const auto is = [&](size_t index, const char* word) {
    return arguments.size() > index && arguments[index] == word;
  };
  const auto number = [&](size_t index) { return Number(arguments[index]); };
  const auto whole = [&](size_t index) { return static_cast<int>(number(index)); };
  double median = 0, cpu = -1;
  if (is(0, "limit") && arguments.size() == 4 && (is(1, "in-place") || is(1, "staged"))) {
    median = is(1, "in-place") ? Median(LimitInPlace(number(2), whole(3)))
                               : BestStaged(number(2), whole(3));
  } else if (is(0, "path") && arguments.size() == 5 && (is(1, "engine") || is(1, "ordinary"))) {
    if (number(2) > kMaxRanks)
      Fail("at most " + std::to_string(kMaxRanks) + " ranks were expected");
    median = Median(Path(whole(2), number(3), whole(4), is(1, "engine")));
  } else if (is(0, "negotiate") && arguments.size() == 5) {
    const Negotiated result = Negotiate(whole(1), whole(2), whole(3), whole(4));
    median = Median(result.seconds);
    cpu = Median(result.cpu_seconds_per_rank);
  } else if (is(0, "cable") && arguments.size() == 6) {
    Cable({arguments[1], arguments[2]}, arguments[3], static_cast<int64_t>(number(4)),
          static_cast<int64_t>(number(5)));
    return 0;
  } else {
    Fail(
        "usage: sparkvod_bench limit in-place|staged BYTES CALLS | path engine|ordinary RANKS "
        "BYTES CALLS | negotiate RANKS WORLDS TENSORS CALLS | cable NAMESPACE NAMESPACE "
        "INTERFACE DELAY_US MEGABITS");
  }
  if (cpu < 0)
    std::printf("{\"seconds\": %.9g}\n", median);
  else
    std::printf("{\"seconds\": %.9g, \"cpu_seconds_per_rank\": %.9g}\n", median, cpu);
  return 0;
}

}  // namespace
}  // namespace sparkvod::bench

int main(int argc, char** argv) {
  return sparkvod::bench::Main(std::vector<std::string>(argv + 1, argv + argc));
}
