// Ranks that meet on one core part.
#include "native/collectives/cores.h"

#include <unistd.h>

#include "native/transport/poller.h"
#include "tests/native/check.h"

namespace sparkvod {
namespace {

struct Arenas {
  explicit Arenas(size_t count) {
    EXPECT(Poller::Create(false, &poller).ok());
    for (size_t r = 0; r < count; ++r) {
      owned.emplace_back();
      EXPECT(Arena::Create(Geometry{}, true, poller.bell(), poller.bell(), &owned.back()).ok());
      all.push_back(owned.back().get());
    }
  }
  uint32_t core(size_t rank) const { return all[rank]->header().core.load(); }
  void Tell(size_t rank, int core) const {
    all[rank]->header().core.store(static_cast<uint32_t>(core) + 1);
  }
  Poller poller;
  std::vector<std::shared_ptr<Arena>> owned;
  std::vector<Arena*> all;
};

cpu_set_t Usable() {
  cpu_set_t may;
  EXPECT(::sched_getaffinity(0, sizeof may, &may) == 0);
  return may;
}

TEST(WhoeverSharesACoreWithALowerRankLeavesIt) {
  const cpu_set_t may = Usable();
  if (CPU_COUNT(&may) < 2) return;
  const Arenas arenas(2);
  Cores cores(arenas.all, 1);
  // It may be moved by others between the two lines, and then finds nobody beside it.
  for (int turn = 0; turn < 50; ++turn) {
    const int here = ::sched_getcpu();
    arenas.Tell(0, here);
    EXPECT(cores.Part());
    EXPECT(arenas.core(1) != static_cast<uint32_t>(here) + 1);
    const cpu_set_t after = Usable();
    EXPECT(CPU_EQUAL(&after, &may));
    ::usleep(1000);
  }
}

TEST(TheLowerRankStays) {
  const Arenas arenas(2);
  Cores cores(arenas.all, 0);
  int shared = 0;
  for (int turn = 0; turn < 50; ++turn) {
    arenas.Tell(1, ::sched_getcpu());
    if (!cores.Part()) ++shared;
    EXPECT(arenas.core(0) > 0);
  }
  EXPECT(shared > 25);
}

TEST(NobodyMovesWhereNoCoreIsFree) {
  const cpu_set_t may = Usable();
  const Arenas arenas(1 + static_cast<size_t>(CPU_COUNT(&may)));
  size_t rank = 0;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &may)) arenas.Tell(rank++, core);
  Cores cores(arenas.all, static_cast<int>(rank));
  EXPECT(!cores.Part());
  const cpu_set_t after = Usable();
  EXPECT(CPU_EQUAL(&after, &may));
}

TEST(RanksWithoutSharedMemoryKnowNothingOfCores) {
  Cores none;
  none.Tell();
  EXPECT(none.Part());
}

}  // namespace
}  // namespace sparkvod
