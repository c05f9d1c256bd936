#include "native/collectives/cores.h"

#include <unistd.h>

#include <algorithm>

#include "native/base/clock.h"

namespace sparkvod {
namespace {

// Between two moves, so that ranks which others keep driving together do not spend their time on
// moving.
constexpr int64_t kSettleNs = 200000;

}  // namespace

int Cores::Usable() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
}

bool Cores::Part() {
  if (arenas_.empty()) return true;
  Tell();
  const auto at = [](const Arena* arena) {
    return arena->header().core.load(std::memory_order_relaxed);
  };
  const auto me = arenas_.begin() + local_rank_;
  const auto here = [&](const Arena* arena) { return at(arena) == at(*me); };
  if (std::none_of(arenas_.begin(), me, here)) return std::none_of(me + 1, arenas_.end(), here);
  const int64_t now = NowNs();
  if (now - parted_ns_ < kSettleNs) return false;
  parted_ns_ = now;
  cpu_set_t may, free;
  if (::sched_getaffinity(0, sizeof may, &may) != 0) return false;
  free = may;
  for (const Arena* arena : arenas_)
    if (const uint32_t core = at(arena); core > 0 && core <= CPU_SETSIZE) CPU_CLR(core - 1, &free);
  if (CPU_COUNT(&free) == 0) return false;
  if (::sched_setaffinity(0, sizeof free, &free) != 0) return false;
  ::sched_setaffinity(0, sizeof may, &may);
  Tell();
  return true;
}

}  // namespace sparkvod
