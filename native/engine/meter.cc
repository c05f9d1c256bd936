#include "native/engine/meter.h"

#include <chrono>

#include "native/base/clock.h"

namespace sparkvod {

void Meter::Start(int64_t steps) {
  const std::lock_guard<std::mutex> lock(mutex_);
  steps_.store(steps);
  samples_.clear();
  seen_.clear();
  cv_.notify_all();
}

bool Meter::Next(double seconds, Sample* sample) {
  std::unique_lock<std::mutex> lock(mutex_);
  cv_.wait_for(lock, std::chrono::duration<double>(seconds),
               [this] { return !samples_.empty() || !on(); });
  if (samples_.empty()) return false;
  *sample = samples_.front();
  samples_.pop_front();
  return true;
}

void Meter::Count(const std::vector<Agreed>& agreed, uint64_t bytes) {
  const int64_t now_ns = NowNs();
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t steps = steps_.load();
  if (steps == 0) return;
  if (seen_.size() > kMostNames) seen_.clear();
  bool complete = false;
  Sample sample;
  const auto counted = [](const Agreed& a) {
    return a.error.ok() && a.operation != nullptr && HasTensors(a.operation->request.collective);
  };
  for (const Agreed& a : agreed) {
    if (!counted(a)) continue;
    Seen& seen = seen_[a.operation->key];
    if (seen.count++ == 0) {
      seen.bytes = bytes;
      seen.ns = now_ns;
    } else if (seen.count > steps) {
      complete = true;
      sample = {bytes - seen.bytes, now_ns - seen.ns};
    }
  }
  if (!complete) return;
  // The next one begins where this one has ended.
  seen_.clear();
  for (const Agreed& a : agreed)
    if (counted(a)) seen_[a.operation->key] = {1, bytes, now_ns};
  if (samples_.size() == kMostSamples) samples_.pop_front();
  samples_.push_back(sample);
  cv_.notify_all();
}

void Meter::Restart() {
  const std::lock_guard<std::mutex> lock(mutex_);
  samples_.clear();
  seen_.clear();
}

}  // namespace sparkvod
