#include "native/engine/executor.h"

#include <cstring>

namespace sparkvod {

Executor::Executor(World* world, Communicator* comm, std::unique_ptr<Backend> backend,
                   size_t fusion_threshold, Finish finish)
    : world_(world),
      comm_(comm),
      backend_(std::move(backend)),
      fusion_threshold_(fusion_threshold),
      finish_(std::move(finish)) {}

Result Executor::Execute(const std::vector<Agreed>& agreed) {
  std::vector<size_t> left(agreed.size(), 1);  // backend calls that an operation still waits for
  for (size_t i = 0; i < agreed.size(); ++i) {
    const Request& request = agreed[i].operation->request;
    if (request.collective == Collective::kAllreduce) left[i] = request.entries.size();
    if (!agreed[i].error.ok()) finish_(agreed[i].operation, agreed[i].error);
  }
  for (const Batch& batch : PlanBatches(agreed, fusion_threshold_)) {
    SPARKVOD_TRY(ExecuteBatch(batch, agreed));
    for (const Batch::Piece& piece : batch.pieces)
      if (--left[piece.agreed] == 0) finish_(agreed[piece.agreed].operation, {});
  }
  return {};
}

Result Executor::ExecuteBatch(const Batch& batch, const std::vector<Agreed>& agreed) {
  const Agreed& first = agreed[batch.pieces[0].agreed];
  const Request& request = first.operation->request;
  const size_t others = batch.pieces.size() - 1;
  comm_->Describe(std::string(NameOf(request.collective)) + " of '" + request.name + "'" +
                  (others > 0 ? " and " + std::to_string(others) + " more" : ""));
  Carrier carrier;
  size_t bytes = batch.bytes;
  const int64_t began_ns = NowNs();
  for (const Batch::Piece& piece : batch.pieces)
    if (Operation& o = *agreed[piece.agreed].operation; o.began_ns == 0) o.began_ns = began_ns;
  switch (request.collective) {
    case Collective::kAllreduce: {
      AllreduceCall call = batch.call;
      for (const Batch::Piece& piece : batch.pieces)
        call.parts.push_back(agreed[piece.agreed].operation->parts[piece.entry]);
      SPARKVOD_TRY(backend_->Allreduce(call, &carrier));
      break;
    }
    case Collective::kAllgather:
      SPARKVOD_TRY(Allgather(first, &carrier, &bytes));
      break;
    case Collective::kBroadcast:
      SPARKVOD_TRY(Broadcast(first, &carrier, &bytes));
      break;
    case Collective::kReducescatter:
      SPARKVOD_TRY(Reducescatter(first, &carrier, &bytes));
      break;
    case Collective::kAlltoall:
      SPARKVOD_TRY(Alltoall(first, &carrier, &bytes));
      break;
    case Collective::kBarrier:
    case Collective::kJoin:
      break;  // the agreement was the barrier
  }
  const int64_t ended_ns = NowNs();
  if (Timeline* told = comm_->timeline(); told != nullptr && told->on())
    told->Add({Lane::kEngine,
               {},
               std::string(NameOf(request.collective)) + " " + carrier.algorithm,
               began_ns,
               ended_ns,
               static_cast<int64_t>(bytes),
               comm_->doing()});
  const std::lock_guard<std::mutex> lock(mutex_);
  Stats::Carried& carried = counts_[std::string(NameOf(request.collective)) + "/" +
                                    comm_->transport() + "/" + carrier.algorithm];
  ++carried.calls;
  carried.tensors += batch.pieces.size();
  carried.bytes += bytes;
  carried.ns += ended_ns - began_ns;
  carried.by_microseconds.Add(static_cast<uint64_t>(ended_ns - began_ns) / 1000);
  carried.by_bytes.Add(bytes);
  return {};
}

Result Executor::MakeOutput(Operation* operation, std::vector<int64_t> rows, size_t row_bytes,
                            std::vector<size_t>* offsets) {
  offsets->assign(1, 0);
  for (const int64_t r : rows)
    offsets->push_back(offsets->back() + static_cast<size_t>(r) * row_bytes);
  char* data = nullptr;
  const std::shared_ptr<Heap>& heap = world_->arena->heap();
  SPARKVOD_TRY(heap->Allocate(offsets->back(), &data, false));
  operation->outputs.push_back(
      {std::make_shared<Memory>(heap, data, offsets->back()), std::move(rows)});
  return {};
}

Result Executor::Allgather(const Agreed& agreed, Carrier* carrier, size_t* bytes) {
  Operation& operation = *agreed.operation;
  for (size_t e = 0; e < operation.parts.size(); ++e) {
    std::vector<int64_t> rows;
    for (const Request& r : *agreed.by_rank) rows.push_back(r.entries[e].shape[0]);
    std::vector<size_t> offsets;
    SPARKVOD_TRY(MakeOutput(&operation, std::move(rows), operation.request.entries[e].row_bytes(),
                            &offsets));
    if (offsets.back() > 0)
      SPARKVOD_TRY(backend_->Allgather(operation.parts[e].in, operation.outputs[e].memory->data(),
                                       offsets, carrier));
    *bytes += offsets.back();
  }
  return {};
}

Result Executor::Broadcast(const Agreed& agreed, Carrier* carrier, size_t* bytes) {
  const Part& part = agreed.operation->parts[0];
  const Request& request = agreed.operation->request;
  *bytes = part.count * SizeOf(request.entries[0].dtype);
  if (request.root == comm_->rank() && part.in != part.out && *bytes > 0)
    std::memcpy(part.out, part.in, *bytes);
  const auto root = static_cast<size_t>(request.root);
  return backend_->Broadcast(part.out, *bytes, request.root,
                             (*agreed.by_rank)[root].entries[0].placement, carrier);
}

Result Executor::Reducescatter(const Agreed& agreed, Carrier* carrier, size_t* bytes) {
  const Request& request = agreed.operation->request;
  for (size_t e = 0; e < request.entries.size(); ++e) {
    const Entry& entry = request.entries[e];
    const size_t row = entry.row_bytes() / SizeOf(entry.dtype);
    ReducescatterCall call{entry.dtype,
                           request.op,
                           request.prescale,
                           request.postscale,
                           agreed.average_over,
                           agreed.operation->parts[e],
                           {},
                           PlacementOf(*agreed.by_rank, e)};
    for (int r = 0; r <= comm_->size(); ++r)
      call.begins.push_back(row * static_cast<size_t>(FirstRow(entry.shape[0], r, comm_->size())));
    SPARKVOD_TRY(backend_->Reducescatter(call, carrier));
    *bytes += call.begins.back() * SizeOf(entry.dtype);
  }
  return {};
}

Result Executor::Alltoall(const Agreed& agreed, Carrier* carrier, size_t* bytes) {
  Operation& operation = *agreed.operation;
  const size_t row_bytes = operation.request.entries[0].row_bytes();
  AlltoallCall call;
  call.in = operation.parts[0].in;
  std::vector<int64_t> received;
  size_t moved = 0;
  for (const Request& r : *agreed.by_rank) {
    received.push_back(r.splits[static_cast<size_t>(comm_->rank())]);
    for (const int64_t rows : r.splits) {
      call.bytes.push_back(static_cast<size_t>(rows) * row_bytes);
      moved += call.bytes.back();
    }
  }
  std::vector<size_t> offsets;
  SPARKVOD_TRY(MakeOutput(&operation, std::move(received), row_bytes, &offsets));
  call.out = operation.outputs[0].memory->data();
  *bytes = offsets.back();
  return moved == 0 ? Result::Ok() : backend_->Alltoall(call, carrier);
}

std::map<std::string, Stats::Carried> Executor::Counts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

}  // namespace sparkvod
