// Worlds under a limit of address space, as 'ulimit -v' and spark.executor.pyspark.memory set one.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "tests/native/world.h"

namespace sparkvod {
namespace {

using namespace check;  // NOLINT: a test of what check's worlds run

constexpr size_t kMiB = 1 << 20;

// What this process may map from now on.
void LeaveAddressSpace(size_t bytes) {
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlim_t most = pages * static_cast<size_t>(::sysconf(_SC_PAGESIZE)) + bytes;
  const rlimit limit{most, most};
  EXPECT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
}

// Runs `size` ranks, each of which may map `bytes`, and expects right sums, over `carrier`.
void SumWithin(const std::string& transport, int size, size_t bytes, const std::string& carrier) {
  RunProcesses(size, [&](int rank, Board& board) {
    LeaveAddressSpace(bytes);
    Config config = TestConfig();
    config.transport = transport;
    config.arena_bytes = 0;
    config.staging_bytes = 4 << 20;
    std::unique_ptr<Engine> engine;
    std::string endpoint;
    EXPECT(Engine::Create(config, &engine).ok());
    EXPECT_EQ(engine->Listen(&endpoint).Report(), "ok");
    const Result joined = engine->Connect(rank, board.Gather(rank, endpoint), "s");
    EXPECT_EQ(joined.Report(), "ok");
    board.Barrier(rank);
    if (!joined.ok()) return;
    std::shared_ptr<Memory> memory;
    EXPECT_EQ(engine->Allocate(kMiB, &memory).Report(), "ok");
    auto* const inside = reinterpret_cast<float*>(memory->data());
    std::vector<float> outside(kMiB / sizeof(float), static_cast<float>(rank + 1));
    std::fill_n(inside, outside.size(), static_cast<float>(rank + 1));
    const auto count = static_cast<int64_t>(outside.size());
    for (float* data : {inside, outside.data()}) {
      const Request request = AllreduceOf("sum", DType::kFloat32, {count});
      EXPECT_EQ(Run(*engine, request, {{data, data, outside.size()}}).Report(), "ok");
      EXPECT_EQ(data[outside.size() - 1], static_cast<float>(size * (size + 1)) / 2);
    }
    EXPECT(Carried(*engine, "allreduce/" + carrier).calls > 0);
    memory.reset();
    EXPECT(engine->Shutdown().ok());
  });
}

TEST(AWorldFitsIntoALimitOfAddressSpace) {
  if (!CanFork() || kSanitized) return;  // sanitizers map far more than any such limit
  SumWithin("auto", 2, 600 * kMiB, "shm");
  SumWithin("auto", 3, 400 * kMiB, "shm");
  SumWithin("tcp", 2, 400 * kMiB, "tcp");
  // Not enough for three arenas: TCP, which needs one.
  SumWithin("auto", 3, 100 * kMiB, "tcp");
}

}  // namespace
}  // namespace sparkvod
