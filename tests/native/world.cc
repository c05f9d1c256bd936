#include "tests/native/world.h"

namespace sparkvod::check {

std::vector<Kind> Kinds() {
  std::vector<Kind> kinds = {kInproc, kTcp};
  if (CanFork()) kinds.push_back(kShm);
  return kinds;
}

Config TestConfig() {
  Config config;
  config.log_level = "error";
  config.address = "127.0.0.1";
  // What hangs is given up a good deal before the whole world is.
  config.start_timeout = Patience() / 2;
  config.collective_timeout = Patience() / 2;
  config.staging_bytes = 256 << 10;
  config.arena_bytes = 64 << 20;
  return config;
}

void RunWorld(const Kind& kind, int size, const RankBody& body, const WorldOptions& options) {
  const auto rank_body = [&](int rank, Board& board) {
    Config config = options.config;
    config.transport = kind.transport == kInproc.transport ? "auto" : kind.transport;
    if (!options.hosts.empty()) config.host_id = options.hosts[static_cast<size_t>(rank)];
    std::unique_ptr<Engine> engine;
    std::string endpoint;
    Result result = Engine::Create(config, &engine);
    if (result.ok()) result = engine->Listen(&endpoint);
    const std::vector<std::string> endpoints = board.Gather(rank, endpoint);
    if (result.ok()) result = engine->Connect(rank, endpoints, "the job's secret");
    EXPECT_EQ(result.Report(), "ok");
    if (options.meet) board.Barrier(rank);
    if (!result.ok()) return;
    body(*engine, rank);
    if (options.shutdown) EXPECT_EQ(engine->Shutdown().Report(), "ok");
  };
  const Holdings holdings;
  if (kind.processes || !options.killed.empty())
    RunProcesses(size, rank_body, options.killed, options.seconds);
  else
    RunThreads(size, rank_body, options.seconds);
  if (options.check_left) holdings.ExpectUnchanged(__FILE__, __LINE__);
}

Result Run(Engine& engine, const Request& request, const std::vector<Part>& parts, bool wait_only) {
  int64_t handle = 0;
  SPARKVOD_TRY(engine.Submit(request, parts, !wait_only, &handle));
  return End(engine, handle);
}

Request RequestOf(const std::string& name, Collective collective, std::vector<Entry> entries) {
  Request request;
  request.name = name;
  request.collective = collective;
  request.entries = std::move(entries);
  return request;
}

Request AllreduceOf(const std::string& name, DType dtype, std::vector<int64_t> shape, ReduceOp op) {
  Request request = RequestOf(name, Collective::kAllreduce, {{dtype, std::move(shape)}});
  request.op = op;
  return request;
}

int64_t Start(Engine& engine, const Request& request, void* data) {
  int64_t handle = 0;
  const auto count = static_cast<size_t>(request.entries[0].count());
  EXPECT_EQ(engine.Submit(request, {{data, data, count}}, true, &handle).Report(), "ok");
  return handle;
}

Result End(Engine& engine, int64_t handle) {
  Result result = engine.Wait(handle);
  engine.Release(handle);
  return result;
}

Result Gather(Engine& engine, const std::string& name, int64_t rows, int64_t width, float value,
              std::vector<float>* got, std::vector<int64_t>* rows_of) {
  Request request;
  request.name = name;
  request.collective = Collective::kAllgather;
  request.entries.push_back({DType::kFloat32, {rows, width}});
  const std::vector<float> own(static_cast<size_t>(rows * width), value);
  int64_t handle = 0;
  SPARKVOD_TRY(engine.Submit(request, {{own.data(), nullptr, own.size()}}, false, &handle));
  Result result = engine.Wait(handle);
  std::shared_ptr<Operation> operation;
  SPARKVOD_TRY(engine.Find(handle, &operation));
  engine.Release(handle);
  if (!result.ok()) return result;
  const auto* data = reinterpret_cast<const float*>(operation->outputs[0].memory->data());
  got->assign(data, data + operation->outputs[0].memory->bytes() / sizeof(float));
  *rows_of = operation->outputs[0].rows;
  return result;
}

Result BarrierOf(Engine& engine, const std::string& name) {
  Request request;
  request.name = name;
  request.collective = Collective::kBarrier;
  return Run(engine, request, {});
}

Stats::Carried Carried(Engine& engine, const std::string& prefix) {
  Stats::Carried sum;
  for (const auto& [key, carried] : engine.GetStats().collectives) {
    if (key.rfind(prefix, 0) != 0) continue;
    sum.calls += carried.calls;
    sum.tensors += carried.tensors;
    sum.bytes += carried.bytes;
  }
  return sum;
}

}  // namespace sparkvod::check
