#include "native/engine/stall.h"

#include <algorithm>
#include <cstdio>

namespace sparkvod {
namespace {

int64_t Ns(double seconds) {
  // A limit beyond a century is none.
  return seconds > 0 && seconds < 3e9 ? static_cast<int64_t>(seconds * 1e9) : 0;
}

std::string Seconds(int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", static_cast<double>(ns) * 1e-9);
  return text;
}

}  // namespace

StallInspector::StallInspector(const Config& config, Negotiator* negotiator, Logger log,
                               std::function<void(const std::string&)> late)
    : warn_ns_(Ns(config.stall_check_time_seconds)),
      fail_ns_(Ns(config.collective_timeout)),
      negotiator_(negotiator),
      log_(std::move(log)),
      late_(std::move(late)) {}

int64_t StallInspector::WarnDueNs(int64_t oldest_ns) const {
  return warn_ns_ == 0 ? INT64_MAX : std::max(oldest_ns, warned_ns_) + warn_ns_;
}

// Half way to the limit, so that who is late is known when it comes.
int64_t StallInspector::NameDueNs(int64_t oldest_ns) const {
  return fail_ns_ == 0 || named_oldest_ns_ == oldest_ns ? INT64_MAX : oldest_ns + fail_ns_ / 2;
}

int64_t StallInspector::FailDueNs(int64_t oldest_ns) const {
  return fail_ns_ == 0 ? INT64_MAX : oldest_ns + fail_ns_;
}

int StallInspector::DueMs() const {
  if (!negotiator_->pending() || (warn_ns_ == 0 && fail_ns_ == 0)) return -1;
  const int64_t oldest = negotiator_->oldest_ns();
  const int64_t due = std::min({WarnDueNs(oldest), NameDueNs(oldest), FailDueNs(oldest)});
  const int64_t left = std::max<int64_t>(due - NowNs(), 0);
  return static_cast<int>(std::min<int64_t>(left / 1000000 + 1, 3600000));
}

Result StallInspector::Check(bool* ask) {
  if (!negotiator_->pending() || (warn_ns_ == 0 && fail_ns_ == 0)) return {};
  const int64_t oldest = negotiator_->oldest_ns(), now = NowNs();
  if (now >= FailDueNs(oldest))
    return Result::Fail(Code::kTimeout, negotiator_->Missing(now, false, 0) +
                                            " (limit: " + Seconds(fail_ns_) +
                                            " s, SPARKVOD_COLLECTIVE_TIMEOUT); every rank must "
                                            "make the same calls");
  const bool warn = now >= WarnDueNs(oldest);
  if (!warn && now < NameDueNs(oldest)) return {};
  if (warn) warned_ns_ = now;
  named_oldest_ns_ = oldest;
  negotiator_->Unmask(warn);
  *ask = true;
  return {};
}

void StallInspector::AfterCycle(bool stalled, bool* again) {
  if (stalled) {
    // One warning at a time, whoever asks first.
    warned_ns_ = NowNs();
    report_ = true;
    *again = true;
    return;
  }
  if (!report_) return;
  report_ = false;
  // Half the time, because this rank may have submitted what it leads after the one that asked.
  const std::string missing = negotiator_->Missing(NowNs(), true, warn_ns_ / 2);
  if (!missing.empty())
    log_.Warning(missing +
                 " (SPARKVOD_STALL_CHECK_TIME_SECONDS); every rank must make the same calls");
  const std::string awaited = negotiator_->Awaited();
  if (!awaited.empty()) late_(awaited);
}

}  // namespace sparkvod
