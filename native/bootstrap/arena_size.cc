#include "native/bootstrap/arena_size.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <string>
#include <utility>

#include "native/transport/shared/layout.h"

namespace sparkvod {
namespace {

constexpr uint64_t kNoLimit = UINT64_MAX;
// With a smaller heap than this, or than the one that was configured, ranks use TCP instead.
constexpr uint64_t kLeastHeap = 16 << 20;

// Counts the ranks of each host, and the threads among them that are ranks of one process.
class Neighbours {
 public:
  explicit Neighbours(const std::vector<Endpoint>& endpoints) {
    for (const Endpoint& e : endpoints) {
      ++of_host_[e.host_id];
      ++of_process_[{e.host_id, e.process}];
    }
  }
  // Whether several processes of this rank's host would share memory.
  bool Share(const Endpoint& e) const { return Local(e) > Threads(e) && e.transport != "tcp"; }
  // What the heap of each arena may take in this rank's process; 0 when not even the rest fits.
  uint64_t HeapOf(const Endpoint& e) const {
    const uint64_t local = Local(e), threads = Threads(e);
    Geometry geometry;
    geometry.staging_bytes = static_cast<size_t>(e.staging_bytes);
    geometry.local_size = e.transport == "tcp" ? 1 : static_cast<int>(local);
    // Each thread has an arena of its own, and maps those of other processes for itself.
    const uint64_t arenas = threads + (Share(e) ? threads * (local - threads) : 0);
    const uint64_t each = e.address_space / arenas / kPage * kPage, rest = geometry.heap();
    return each > rest ? each - rest : 0;
  }

 private:
  uint64_t Local(const Endpoint& e) const { return of_host_.at(e.host_id); }
  uint64_t Threads(const Endpoint& e) const { return of_process_.at({e.host_id, e.process}); }

  std::map<std::string, uint64_t> of_host_;
  std::map<std::pair<std::string, std::string>, uint64_t> of_process_;
};

uint64_t LeastHeap(const Endpoint& e) { return std::min(kLeastHeap, e.arena_bytes); }

}  // namespace

uint64_t AddressSpaceForArenas() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kNoLimit;
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const uint64_t used = pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return limit.rlim_cur > used ? (limit.rlim_cur - used) / 2 : 0;
}

void RefuseLargeArenas(std::vector<Endpoint>* endpoints) {
  const Neighbours neighbours(*endpoints);
  for (Endpoint& e : *endpoints) {
    if (e.address_space == kNoLimit || !e.not_shared.empty() || !neighbours.Share(e)) continue;
    if (neighbours.HeapOf(e) >= LeastHeap(e)) continue;
    e.not_shared = "its limit of address space leaves " + std::to_string(e.address_space >> 20) +
                   " MiB for it; raise 'ulimit -v' or spark.executor.pyspark.memory";
  }
}

void FitArenas(std::vector<Endpoint>* endpoints) {
  const Neighbours neighbours(*endpoints);
  for (Endpoint& e : *endpoints)
    if (e.address_space != kNoLimit)
      e.arena_bytes = std::min(e.arena_bytes, std::max(neighbours.HeapOf(e), LeastHeap(e)));
}

}  // namespace sparkvod
