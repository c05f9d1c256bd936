#include "native/engine/executor.h"

#include <algorithm>
#include <cstring>

#include "native/collectives/ring.h"

namespace sparkvod {
namespace {

// What a communicator is told to be doing, for as long as this lives.
class Described {
 public:
  Described(Communicator* comm, const char* collective, const std::string* tensor, size_t others)
      : comm_(comm) {
    comm->Describe(collective, tensor, others);
  }
  ~Described() { comm_->Describe("negotiation"); }
  Described(const Described&) = delete;
  Described& operator=(const Described&) = delete;

 private:
  Communicator* comm_;
};

}  // namespace

Executor::Executor(World* world, Communicator* comm, std::unique_ptr<Backend> backend,
                   const Config& config, Finish finish)
    : world_(world),
      comm_(comm),
      backend_(std::move(backend)),
      config_(config),
      finish_(std::move(finish)),
      linger_ns_(config.linger_us * 1000),
      tunables_(TunablesOf(config)) {
  for (int r = 0; r < comm->size(); ++r)
    if (r != comm->rank()) connected_ = std::max(connected_, comm->channel(r).streams());
  for (Tunable t : kTunables) {
    const bool shared = comm->shares_memory();
    if (t.value == &Tunables::one_shot_bytes && !shared) continue;
    if (t.value == &Tunables::link_mbits && shared) continue;
    if (t.value == &Tunables::tcp_streams) t.most = connected_;
    if (t.least < t.most && comm->size() > 1) in_effect_.push_back(t);
  }
}

bool Executor::Offer(const Operation& operation, char* room, size_t bytes) {
  const Request& request = operation.request;
  if (request.collective != Collective::kAllreduce || request.process_set != 0) return false;
  const DType dtype = request.entries[0].dtype;
  for (const Entry& e : request.entries)
    if (e.dtype != dtype) return false;
  return backend_->Offer(dtype, request.op, request.prescale, operation.parts, room, bytes);
}

Result Executor::Execute(const std::vector<Agreed>& agreed, std::vector<const char*> offers) {
  std::vector<size_t> left(agreed.size(), 1);  // backend calls that an operation still waits for
  for (size_t i = 0; i < agreed.size(); ++i) {
    const Request& request = agreed[i].operation->request;
    if (IsFused(request.collective)) left[i] = request.entries.size();
    if (!agreed[i].error.ok()) finish_(agreed[i].operation, agreed[i].error);
  }
  const uint64_t carried_before = carried_bytes_;
  std::vector<Batch> batches = PlanBatches(agreed, static_cast<size_t>(tunables_.fusion_threshold));
  // What was offered comes first. What else a rank agrees on in its sets the others do not know of,
  // so all that counts is whether the offered one goes alone, and whole.
  if (!offers.empty() && !batches.empty() && batches[0].pieces.back().agreed == 0 &&
      batches[0].pieces.size() == agreed[0].operation->request.entries.size())
    batches[0].call.offers = std::move(offers);
  for (const Batch& batch : batches) {
    SPARKVOD_TRY(ExecuteBatch(batch, agreed));
    // Before anybody is told that the last is done, and asks for a sample.
    if (&batch == &batches.back() && meter_.on()) meter_.Count(agreed, carried_bytes_);
    for (const Batch::Piece& piece : batch.pieces)
      if (--left[piece.agreed] == 0) finish_(agreed[piece.agreed].operation, {});
  }
  last_bytes_ = carried_bytes_ - carried_before;
  return {};
}

Result Executor::ExecuteBatch(const Batch& batch, const std::vector<Agreed>& agreed) {
  const Agreed& first = agreed[batch.pieces[0].agreed];
  const Request& request = first.operation->request;
  const size_t others = batch.pieces.size() - 1;
  const Target target = TargetOf(request);
  const Described described(target.comm, NameOf(request.collective), &request.name, others);
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
      SPARKVOD_TRY(target.backend->Allreduce(std::move(call), &carrier));
      break;
    }
    case Collective::kAllgather:
      SPARKVOD_TRY(Allgather(target, batch, agreed, &carrier));
      break;
    case Collective::kBroadcast:
      SPARKVOD_TRY(Broadcast(target, first, &carrier, &bytes));
      break;
    case Collective::kReducescatter:
      SPARKVOD_TRY(Reducescatter(target, batch, agreed, &carrier));
      break;
    case Collective::kAlltoall:
      SPARKVOD_TRY(Alltoall(target, first, &carrier, &bytes));
      break;
    case Collective::kAddSet:
      SPARKVOD_TRY(AddSet(*first.operation));
      break;
    case Collective::kRemoveSet:
      SPARKVOD_TRY(RemoveSet(request));
      break;
    case Collective::kTune:
      SPARKVOD_TRY(Tune(request));
      break;
    case Collective::kBarrier:
    case Collective::kJoin:
      break;  // the agreement was the barrier
  }
  carried_bytes_ += bytes;
  const int64_t ended_ns = NowNs();
  for (const Batch::Piece& piece : batch.pieces)
    agreed[piece.agreed].operation->ended_ns = ended_ns;
  if (Timeline* told = comm_->timeline(); told != nullptr && told->on())
    told->Add({Lane::kEngine,
               {},
               std::string(NameOf(request.collective)) + " " + carrier.algorithm,
               began_ns,
               ended_ns,
               static_cast<int64_t>(bytes),
               target.comm->doing()});
  const std::lock_guard<std::mutex> lock(mutex_);
  Stats::Carried& carried =
      CountOf({request.collective, target.comm->transport(), carrier.algorithm});
  ++carried.calls;
  carried.tensors += batch.pieces.size();
  carried.bytes += bytes;
  carried.ns += ended_ns - began_ns;
  carried.by_microseconds.Add(static_cast<uint64_t>(ended_ns - began_ns) / 1000);
  carried.by_bytes.Add(bytes);
  return {};
}

Result Executor::Broadcast(const Target& target, const Agreed& agreed, Carrier* carrier,
                           size_t* bytes) {
  const Part& part = agreed.operation->parts[0];
  const Request& request = agreed.operation->request;
  *bytes = part.count * SizeOf(request.entries[0].dtype);
  const int root = agreed.members->PlaceOf(request.root);
  if (root == target.comm->rank() && part.in != part.out && *bytes > 0)
    std::memcpy(part.out, part.in, *bytes);
  return target.backend->Broadcast(
      part.out, *bytes, root, (*agreed.by_rank)[static_cast<size_t>(root)].entries[0].placement,
      carrier);
}

Result Executor::Alltoall(const Target& target, const Agreed& agreed, Carrier* carrier,
                          size_t* bytes) {
  Operation& operation = *agreed.operation;
  const size_t row_bytes = operation.request.entries[0].row_bytes();
  AlltoallCall call;
  call.in = operation.parts[0].in;
  std::vector<int64_t> received;
  size_t moved = 0;
  for (const Request& r : *agreed.by_rank) {
    received.push_back(r.splits[static_cast<size_t>(target.comm->rank())]);
    for (const int64_t rows : r.splits) {
      call.bytes.push_back(static_cast<size_t>(rows) * row_bytes);
      moved += call.bytes.back();
    }
  }
  std::vector<size_t> offsets;
  operation.outputs.resize(1);
  SPARKVOD_TRY(MakeOutput(std::move(received), row_bytes, &operation.outputs[0], &offsets));
  call.out = operation.outputs[0].memory->data();
  *bytes = offsets.back();
  return moved == 0 ? Result::Ok() : target.backend->Alltoall(call, carrier);
}

Executor::Target Executor::TargetOf(const Request& request) {
  if (request.process_set == 0) return {comm_, backend_.get()};
  const OfSet& set = sets_.at(request.process_set);
  return {set.comm.get(), set.backend.get()};
}

Result Executor::AddSet(const Operation& operation) {
  const Members& members = *operation.set;
  if (members.place < 0) return {};
  OfSet set;
  set.comm = std::make_unique<Communicator>(*comm_, members.ranks);
  set.comm->Describe("adding process set " + std::to_string(members.id));
  const std::shared_ptr<Heap>& heap = world_->arena->heap();
  SPARKVOD_TRY(heap->Allocate(set.comm->LaneBytes(), &set.lane));
  std::vector<int64_t> lanes(members.ranks.size());
  lanes[static_cast<size_t>(members.place)] = heap->OffsetOf(set.lane, set.comm->LaneBytes());
  SPARKVOD_TRY(RingAllgather(*set.comm, reinterpret_cast<char*>(lanes.data()), sizeof lanes[0]));
  set.comm->MoveIn(lanes);
  SPARKVOD_TRY(MakeBackend("builtin", set.comm.get(), config_, &set.backend));
  set.backend->Tune(tunables_);
  sets_[members.id] = std::move(set);
  return {};
}

// Nobody may look into a lane any more when it is freed. Whoever has heard from all members knows
// that all have ended what they did in the set.
Result Executor::RemoveSet(const Request& request) {
  const auto set = sets_.find(request.root);
  if (set == sets_.end()) return {};
  std::vector<char> heard(static_cast<size_t>(set->second.comm->size()));
  set->second.comm->Describe("removing process set " + std::to_string(request.root));
  SPARKVOD_TRY(RingAllgather(*set->second.comm, heard.data(), 1));
  world_->arena->heap()->Free(set->second.lane);
  sets_.erase(set);
  return {};
}

// All that was sent before has been received, on every channel: who executes this has executed what
// came before, and so has its peer when it comes here. So both ends change over at the same byte.
Result Executor::Tune(const Request& request) {
  Tunables tunables;
  SPARKVOD_TRY(Unpack(request.splits, &tunables));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    tunables_ = tunables;
  }
  linger_ns_.store(tunables.linger_us * 1000);
  backend_->Tune(tunables);
  for (auto& [id, set] : sets_) set.backend->Tune(tunables);
  for (int r = 0; r < comm_->size(); ++r)
    if (r != comm_->rank()) comm_->channel(r).UseStreams(static_cast<int>(tunables.tcp_streams));
  meter_.Restart();
  return {};
}

Tunables Executor::tunables() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return tunables_;
}

Result Executor::CheckTune(const std::vector<int64_t>& numbers) const {
  Tunables tunables;
  SPARKVOD_TRY(Unpack(numbers, &tunables));
  const auto most = std::max<int64_t>(connected_, config_.tcp_streams);
  if (tunables.tcp_streams <= most) return {};
  return Result::Fail(Code::kInvalid, "tcp_streams=" + std::to_string(tunables.tcp_streams) +
                                          " was found, at most the " + std::to_string(most) +
                                          " that are connected were expected; connect more with "
                                          "SPARKVOD_TCP_STREAMS");
}

std::map<std::string, Stats::Carried> Executor::Counts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

Stats::Carried& Executor::CountOf(const Way& way) {
  Stats::Carried*& known = count_of_[way];
  if (known == nullptr) {
    const auto& [collective, transport, algorithm] = way;
    known = &counts_[std::string(NameOf(collective)) + "/" + transport + "/" + algorithm];
  }
  return *known;
}

}  // namespace sparkvod
