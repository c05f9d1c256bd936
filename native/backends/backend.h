// Who executes a collective once the ranks have agreed on it.
//
// A backend is given calls in the same order on every rank, one at a time, by the holder of the
// driver token, and blocks until the call is done. What it cannot do it denies in Supports; it is
// never asked for that.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "native/base/config.h"
#include "native/base/dtype.h"
#include "native/base/result.h"
#include "native/base/tunables.h"
#include "native/collectives/communicator.h"
#include "native/collectives/direct.h"

namespace sparkvod {

enum class Collective : uint8_t {
  kAllreduce = 0,
  kAllgather,
  kBroadcast,
  kBarrier,
  kReducescatter,
  kAlltoall,
  kJoin,
  kAddSet,
  kRemoveSet,
  kTune,
};
constexpr int kCollectiveCount = 10;
const char* NameOf(Collective collective);
// Whether it is about tensors.
constexpr bool HasTensors(Collective collective) {
  return collective != Collective::kBarrier && collective < Collective::kJoin;
}
// Whether ranks may have different numbers of rows.
constexpr bool HasOwnRows(Collective collective) {
  return collective == Collective::kAllgather || collective == Collective::kAlltoall;
}
// Whether small ones travel together, tensor by tensor.
constexpr bool IsFused(Collective collective) {
  return collective == Collective::kAllreduce || collective == Collective::kAllgather ||
         collective == Collective::kReducescatter;
}
// Whether it has a ReduceOp.
constexpr bool Reduces(Collective collective) {
  return collective == Collective::kAllreduce || collective == Collective::kReducescatter;
}

struct AllreduceCall {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1, postscale = 1;
  int average_over = 1;  // ranks, for averages
  std::vector<Part> parts;
  // Of a single part that every rank has in engine memory and in place: where, by rank. Else empty.
  std::vector<int64_t> placement;
  // By rank: what Offer laid down there of the same parts. Empty: nothing.
  std::vector<const char*> offers;
};

// Rank r gets elements begins[r] to begins[r+1] of what the ranks' inputs are reduced to.
struct ReducescatterCall {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1, postscale = 1;
  int average_over = 1;
  Part part;                       // in: everything; out: the own share
  std::vector<size_t> begins;      // n + 1
  std::vector<int64_t> placement;  // as in AllreduceCall, of the inputs
};

// `out` is engine memory.
struct AlltoallCall {
  const void* in = nullptr;
  char* out = nullptr;
  std::vector<size_t> bytes;  // [q * n + r]: what rank q sends to rank r
};

// What carried a call, for stats().
struct Carrier {
  const char* algorithm = "none";
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;
  // `op` is of the collectives that reduce.
  virtual bool Supports(Collective collective, ReduceOp op, DType dtype) const = 0;
  virtual Result Allreduce(AllreduceCall call, Carrier* carrier) = 0;
  // Lays down in `room` what the other ranks need of an allreduce's parts, before they have agreed
  // on it; true when that spares them a step.
  virtual bool Offer(DType, ReduceOp, double /*prescale*/, const std::vector<Part>&, char* /*room*/,
                     size_t /*bytes*/) {
    return false;
  }
  // own: this rank's block; out: engine memory for all blocks; offsets: where each rank's block
  // begins in it, and the end (bytes).
  virtual Result Allgather(const void* own, char* out, const std::vector<size_t>& offsets,
                           Carrier* carrier) = 0;
  // root_offset: where the root has the data in its arena, -1 when it is not in engine memory.
  virtual Result Broadcast(void* data, size_t bytes, int root, int64_t root_offset,
                           Carrier* carrier) = 0;
  virtual Result Reducescatter(const ReducescatterCall& call, Carrier* carrier) = 0;
  virtual Result Alltoall(const AlltoallCall& call, Carrier* carrier) = 0;
  // What it does from now on, at the same call on every rank.
  virtual void Tune(const Tunables& tunables) = 0;
};

// Makes the backend of that name; an unknown name yields an error that lists the valid ones.
Result MakeBackend(const std::string& name, Communicator* comm, const Config& config,
                   std::unique_ptr<Backend>* out);

}  // namespace sparkvod
