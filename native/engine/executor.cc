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
      SPARKVOD_TRY(Allgather(first, &carrier));
      bytes = first.operation->gathered->bytes();
      break;
    case Collective::kBroadcast: {
      const Part& part = first.operation->parts[0];
      bytes = part.count * SizeOf(request.entries[0].dtype);
      if (request.root == comm_->rank() && part.in != part.out)
        std::memcpy(part.out, part.in, bytes);
      SPARKVOD_TRY(backend_->Broadcast(part.out, bytes, request.root, &carrier));
      break;
    }
    case Collective::kBarrier:
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
  return {};
}

Result Executor::Allgather(const Agreed& agreed, Carrier* carrier) {
  Operation& operation = *agreed.operation;
  const Entry& own = operation.request.entries[0];
  size_t row_bytes = SizeOf(own.dtype);
  for (size_t d = 1; d < own.shape.size(); ++d) row_bytes *= static_cast<size_t>(own.shape[d]);
  std::vector<size_t> offsets{0};
  for (const Request& r : *agreed.by_rank) {
    const int64_t rows = r.entries[0].shape[0];
    operation.rows.push_back(rows);
    offsets.push_back(offsets.back() + static_cast<size_t>(rows) * row_bytes);
  }
  char* data = nullptr;
  SPARKVOD_TRY(world_->arena->heap()->Allocate(offsets.back(), &data));
  operation.gathered = std::make_shared<Memory>(world_->arena->heap(), data, offsets.back());
  const auto me = static_cast<size_t>(comm_->rank());
  const size_t own_bytes = offsets[me + 1] - offsets[me];
  if (own_bytes > 0) std::memcpy(data + offsets[me], operation.parts[0].in, own_bytes);
  return backend_->Allgather(data, offsets, carrier);
}

std::map<std::string, Stats::Carried> Executor::Counts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

}  // namespace sparkvod
