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
#include "native/collectives/communicator.h"
#include "native/collectives/direct.h"

namespace sparkvod {

enum class Collective : uint8_t { kAllreduce = 0, kAllgather, kBroadcast, kBarrier };
constexpr int kCollectiveCount = 4;
const char* NameOf(Collective collective);

struct AllreduceCall {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1, postscale = 1;
  std::vector<Part> parts;
  // Of a single part that every rank has in engine memory and in place: where, by rank. Else empty.
  std::vector<int64_t> placement;
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
  virtual Result Allreduce(const AllreduceCall& call, Carrier* carrier) = 0;
  // data: all blocks, the own one filled in; offsets: where each rank's block begins, and the end
  // (bytes).
  virtual Result Allgather(char* data, const std::vector<size_t>& offsets, Carrier* carrier) = 0;
  virtual Result Broadcast(void* data, size_t bytes, int root, Carrier* carrier) = 0;
};

// Makes the backend of that name; an unknown name yields an error that lists the valid ones.
Result MakeBackend(const std::string& name, Communicator* comm, const Config& config,
                   std::unique_ptr<Backend>* out);

}  // namespace sparkvod
