// Worlds of engines for tests: N engines in N threads, or in N processes, and the collectives as
// one-line calls.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "native/engine/engine.h"
#include "tests/native/check.h"
#include "tests/native/ranks.h"

namespace sparkvod::check {

// One way to run a world: its name as stats() has it, and whether its ranks must be processes.
struct Kind {
  std::string transport;
  bool processes;
};
const Kind kInproc{"inproc", false}, kTcp{"tcp", false}, kShm{"shm", true};
// All of them that this build can run.
std::vector<Kind> Kinds();

// Knobs for quick tests: small areas, deadlines of seconds.
Config TestConfig();

using RankBody = std::function<void(Engine& engine, int rank)>;

struct WorldOptions {
  Config config = TestConfig();
  double seconds = Patience();          // until the test is given up
  std::vector<int> killed = {};         // ranks that die by a signal (processes only)
  bool check_left = true;               // that no file and no thread of it is left
  std::vector<std::string> hosts = {};  // by rank: which host it believes to be on; empty: this one
  bool shutdown = true;                 // shut the engines down in agreement after the body
  bool meet = false;                    // nobody begins, or leaves, before all have connected
};

// Joins `size` engines, runs the body on each, shuts them down; checks that no file and no thread
// of a world of threads is left.
void RunWorld(const Kind& kind, int size, const RankBody& body, const WorldOptions& options = {});

// Submits and waits; `wait_only` leaves it to the waiting thread to drive the engine.
Result Run(Engine& engine, const Request& request, const std::vector<Part>& parts,
           bool wait_only = true);

// What to submit: a sum, where it reduces.
Request RequestOf(const std::string& name, Collective collective, std::vector<Entry> entries);

// An allreduce of one tensor.
Request AllreduceOf(const std::string& name, DType dtype, std::vector<int64_t> shape,
                    ReduceOp op = ReduceOp::kSum);

// Submits an allreduce in place, without waiting.
int64_t Start(Engine& engine, const Request& request, void* data);

// How it ended; the handle is released.
Result End(Engine& engine, int64_t handle);

// An allgather of `rows` rows of `width` floats, each set to `value`; `got` becomes everybody's.
Result Gather(Engine& engine, const std::string& name, int64_t rows, int64_t width, float value,
              std::vector<float>* got, std::vector<int64_t>* rows_of);

Result BarrierOf(Engine& engine, const std::string& name);

// Sum of the counters whose key begins with `prefix`.
Stats::Carried Carried(Engine& engine, const std::string& prefix);

}  // namespace sparkvod::check
