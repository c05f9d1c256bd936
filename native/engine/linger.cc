// Waiting a little so that more tensors share a cycle.
#include <algorithm>
#include <chrono>
#include <thread>

#include "native/engine/engine.h"

namespace sparkvod {
namespace {

// A cycle that agreed on this much is worth its messages; tensors of this size travel alone anyway.
constexpr uint64_t kFewBytes = 1 << 20;
// Between two looks whether there is a reason to begin at once.
constexpr int64_t kLookNs = 50000;

}  // namespace

// Only the background thread does it: what nobody waits for yet may come later, and more with it.
// A caller that waits submits nothing meanwhile, so its cycles begin at once, as those do that a
// peer has begun already, since it waits, and all where completions are called: they are what the
// application waits for, as far as is known.
void Engine::Linger() {
  const int64_t linger_ns = executor_->linger_ns();
  if (linger_ns == 0 || again_ || executor_->last_bytes() >= kFewBytes) return;
  const int64_t until_ns = NowNs() + linger_ns;
  for (int64_t now_ns = NowNs(); now_ns < until_ns; now_ns = NowNs()) {
    if (aborted_.load() || want_shutdown_.load()) return;
    bool began = false;
    if (!negotiator_->PeerBegan(&began).ok() || began) return;
    {
      const std::lock_guard<std::mutex> lock(mu_);
      if (waiters_ > 0 || calls_back_) return;
      uint64_t bytes = 0;
      for (const auto& operation : queue_)
        bytes += static_cast<uint64_t>(operation->request.bytes());
      if (bytes >= kFewBytes) return;
    }
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(kLookNs, until_ns - now_ns)));
  }
}

}  // namespace sparkvod
