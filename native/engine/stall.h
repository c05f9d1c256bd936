// Who keeps the others waiting: finds out, warns, and at last gives up.
//
// What was executed before is one bit of a rank that has submitted it, and nobody sees whose bit is
// missing. So a rank that has waited long says its requests in full ("asks"). The others that wait
// do the same in the cycle after, and then every rank knows, for every name, who has submitted it
// and who has not. With a warning in the asking, the lowest rank that waits for a name warns, and
// those that the others wait for learn that they are late.
//
// Used by the holder of the driver token only.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "native/base/config.h"
#include "native/base/log.h"
#include "native/base/result.h"
#include "native/engine/negotiator.h"

namespace sparkvod {

class StallInspector {
 public:
  // `late` is called when the others wait for this rank, with what for.
  StallInspector(const Config& config, Negotiator* negotiator, Logger log,
                 std::function<void(const std::string&)> late);

  // Milliseconds until Check has something to do; -1: not as things are.
  int DueMs() const;
  // The error when this rank has waited for the limit. Sets `ask` when a cycle must follow.
  Result Check(bool* ask);
  // After each cycle, with what it has brought. Sets `again` when another must follow.
  void AfterCycle(bool stalled, bool* again);

 private:
  int64_t WarnDueNs(int64_t oldest_ns) const;
  int64_t NameDueNs(int64_t oldest_ns) const;
  int64_t FailDueNs(int64_t oldest_ns) const;

  int64_t warn_ns_, fail_ns_;  // 0: never
  Negotiator* negotiator_;
  Logger log_;
  std::function<void(const std::string&)> late_;
  int64_t warned_ns_ = 0;        // when a warning was last asked for, by whomever
  int64_t named_oldest_ns_ = 0;  // of which oldest request the late ones were asked for
  bool report_ = false;          // a warning was asked for in the last cycle
};

}  // namespace sparkvod
