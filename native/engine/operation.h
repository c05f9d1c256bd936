// A submitted collective of this rank: its request, its memory, and how it ended.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "native/base/result.h"
#include "native/engine/members.h"
#include "native/engine/request.h"
#include "native/transport/shared/heap.h"

namespace sparkvod {

// Engine memory that outlives the engine that made it for as long as somebody holds it.
class Memory {
 public:
  Memory(std::shared_ptr<Heap> heap, char* data, size_t bytes)
      : heap_(std::move(heap)), data_(data), bytes_(bytes) {}
  ~Memory() { heap_->Free(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<Heap> heap_;
  char* data_;
  size_t bytes_;
};

// What an operation has made in engine memory.
struct Output {
  std::shared_ptr<Memory> memory;
  std::vector<int64_t> rows;  // in the order of the ranks: how many of each lie there
};

struct Operation;

// Called once when an operation has ended, well or not, by whoever drives the engine: it must not
// wait, and may submit.
using Completed = std::function<void(const Operation&)>;

struct Operation {
  explicit Operation(Request of) : request(std::move(of)), key(request.key()) {}

  Request request;
  const std::string key;            // the request's
  std::vector<Part> parts;          // one for each entry of the request
  std::unique_ptr<char[]> scratch;  // memory of its own: of what stands in for a joined rank
  Completed completed;              // empty for those that somebody waits for by handle
  int64_t submitted_ns = 0;
  // Of its life, for the timeline; 0 when nobody wrote one. The driver's.
  int64_t taken_ns = 0;   // first negotiated
  int64_t agreed_ns = 0;  // all ranks have submitted it
  int64_t began_ns = 0;   // first executed
  int64_t ended_ns = 0;   // last executed

  // Written by the driver before `done`, read after it.
  Result result;
  std::vector<Output> outputs;         // of allgather, one for each entry, and alltoall
  int last_joined = -1;                // of join
  std::shared_ptr<const Members> set;  // of add_process_set
  std::atomic<bool> done{false};
};

}  // namespace sparkvod
