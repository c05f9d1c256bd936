#include "native/bindings/current.h"

#include <unistd.h>

#include <atomic>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "native/bindings/errors.h"

namespace sparkvod {
namespace {

static_assert(kTableAllreduce == static_cast<int>(Collective::kAllreduce) &&
              kTableAllgather == static_cast<int>(Collective::kAllgather) &&
              kTableBroadcast == static_cast<int>(Collective::kBroadcast) &&
              kTableBarrier == static_cast<int>(Collective::kBarrier) &&
              kTableReducescatter == static_cast<int>(Collective::kReducescatter) &&
              kTableAlltoall == static_cast<int>(Collective::kAlltoall));

struct Current {
  std::mutex mu;
  std::shared_ptr<Engine> engine;
  std::atomic<pid_t> process{0};  // a forked child has the pointer, and no right to it
};

Current& Now() {
  static Current* current = new Current;  // never destroyed: threads may outlive main
  return *current;
}

std::shared_ptr<Engine> Find() {
  Current& now = Now();
  if (now.process.load() != getpid()) return nullptr;  // before the lock, which may be lost there
  std::lock_guard<std::mutex> lock(now.mu);
  return now.engine;
}

void Tell(const TableCall& call, const char* error, const std::string& message) {
  TableOutcome outcome{error, message.c_str(), 0, nullptr};
  call.done(call.context, &outcome);
}

void Tell(const TableCall& call, const Result& result) {
  Tell(call, ErrorName(result.code()), result.Report());
}

void Finish(const TableCall& call, const Operation& operation) {
  if (!operation.result.ok()) return Tell(call, operation.result);
  std::vector<TableOutput> outputs;
  for (const Output& output : operation.outputs)
    outputs.push_back({output.memory->data(), static_cast<int64_t>(output.memory->bytes()),
                       static_cast<int32_t>(output.rows.size()), output.rows.data(),
                       new std::shared_ptr<Memory>(output.memory)});
  TableOutcome outcome{nullptr, nullptr, static_cast<int32_t>(outputs.size()), outputs.data()};
  call.done(call.context, &outcome);
  for (const TableOutput& output : outputs)
    delete static_cast<std::shared_ptr<Memory>*>(output.owner);
}

void SubmitCall(const TableCall* given) {
  const TableCall call = *given;
  const std::shared_ptr<Engine> engine = Find();
  if (engine == nullptr)
    return Tell(call, "NotInitializedError",
                "an op ran in a process that is in no world; call init() before it");
  Request request;
  request.name = call.name;
  request.collective = static_cast<Collective>(call.collective);
  if (!IsReduceOp(call.op)) return Tell(call, "ValueError", "the reduce operation is unknown");
  request.op = static_cast<ReduceOp>(call.op);
  request.root = call.root;
  request.process_set = call.process_set;
  request.prescale = call.prescale;
  request.postscale = call.postscale;
  request.splits.assign(call.split, call.split + call.splits);
  std::vector<Part> parts;
  for (int32_t k = 0; k < call.tensors; ++k) {
    const TableTensor& tensor = call.tensor[k];
    if (!IsDType(tensor.dtype)) return Tell(call, "ValueError", "a dtype is unknown");
    Entry entry;
    entry.dtype = static_cast<DType>(tensor.dtype);
    entry.shape.assign(tensor.shape, tensor.shape + tensor.dims);
    parts.push_back({tensor.in, tensor.out, static_cast<size_t>(entry.count())});
    request.entries.push_back(std::move(entry));
  }
  const Result result =
      engine->Submit(std::move(request), std::move(parts),
                     [call](const Operation& operation) { Finish(call, operation); });
  if (!result.ok()) Tell(call, result);
}

void ReleaseOwner(void* owner) { delete static_cast<std::shared_ptr<Memory>*>(owner); }

int32_t WorldNumber(int32_t what) {
  const std::shared_ptr<Engine> engine = Find();
  if (engine == nullptr) return -1;
  const Topology& topology = engine->topology();
  switch (what) {
    case kTableRank:
      return topology.rank;
    case kTableSize:
      return topology.size;
    case kTableLocalRank:
      return topology.local_rank;
    case kTableLocalSize:
      return topology.local_size;
    case kTableCrossRank:
      return topology.cross_rank;
    case kTableCrossSize:
      return topology.cross_size;
    default:
      return -1;
  }
}

}  // namespace

void SetCurrent(std::shared_ptr<Engine> engine) {
  Current& now = Now();
  {
    std::lock_guard<std::mutex> lock(now.mu);
    now.engine.swap(engine);
    now.process.store(getpid());
  }
  // What was current before is destroyed here, if nobody else holds it, with the lock gone.
}

const Table& OpsTable() {
  static const Table kTable{kTableVersion, &SubmitCall, &ReleaseOwner, &WorldNumber};
  return kTable;
}

}  // namespace sparkvod
