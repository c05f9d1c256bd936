// Many tensors from many ranks -> one agreed order.
//
// Everything here is replicated: every rank sees the same lists in the same order and comes to the
// same decisions, so no rank directs the others. A request that was executed before and has not
// changed is one bit (the response cache); others travel in full once. A request that differs from
// its cached form evicts it on all ranks.
//
// Used by the holder of the driver token only.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "native/collectives/dissemination.h"
#include "native/engine/operation.h"

namespace sparkvod {

// What all ranks have asked for: this rank's operation and every rank's request (empty when they
// disagree).
struct Agreed {
  std::shared_ptr<Operation> operation;
  std::shared_ptr<const std::vector<Request>> by_rank;
  Result error;  // kMismatch: the operation ends with it, the engine goes on
};

class Negotiator {
 public:
  Negotiator(Communicator* comm, size_t cache_capacity);

  struct Outcome {
    std::vector<Agreed> agreed;  // in the order in which all ranks execute them
    bool shut_down = false;      // some rank wants to end
    bool again = false;          // this rank has requests to say anew
  };
  // One cycle. `fresh` joins what is pending already.
  Result Cycle(std::vector<std::shared_ptr<Operation>> fresh, bool shut_down, Outcome* out);

  // True when a peer has begun the next cycle.
  Result PeerBegan(bool* began) { return dissemination_.PeerBegan(began); }
  // Operations that wait for other ranks.
  bool pending() const { return !waiting_.empty(); }
  // Submission time of the oldest of them; INT64_MAX when there is none.
  int64_t oldest_ns() const;
  // Says the oldest pending request in full instead of by its bit, so that the next cycle shows who
  // is missing.
  void Unmask();
  // "'grad' (allreduce of ...): ranks 1,3 have not submitted it", for every pending operation.
  std::string Missing() const;
  // Takes all pending operations out, for the engine to fail them.
  std::vector<std::shared_ptr<Operation>> TakeAll();

  uint64_t cycles() const { return dissemination_.cycles(); }
  uint64_t cache_hits() const { return hits_; }
  uint64_t cache_misses() const { return misses_; }

 private:
  struct Cached {
    std::shared_ptr<const std::vector<Request>> by_rank;  // null: a free slot
    std::list<size_t>::iterator age;
  };
  // What the ranks have said under one name so far.
  struct Said {
    std::vector<Request> by_rank;
    std::vector<bool> said;
    int count = 0;
  };

  void Hear(int rank, Request request, Outcome* out);
  void Complete(const std::string& name, Said said, Outcome* out);
  void Insert(const std::string& name, std::shared_ptr<const std::vector<Request>> by_rank);
  void Evict(size_t slot);
  std::shared_ptr<Operation> TakeWaiting(const std::string& name);

  Communicator* comm_;
  Dissemination dissemination_;
  size_t capacity_;
  std::vector<Cached> slots_;
  std::set<size_t> free_;   // slots that evictions left empty
  std::list<size_t> ages_;  // used slots, the least recently used first
  std::unordered_map<std::string, size_t> slot_of_;
  std::map<std::string, Said> said_;  // names that some ranks have said in full, not yet all
  std::unordered_map<std::string, std::shared_ptr<Operation>> waiting_;  // this rank's operations
  std::vector<std::shared_ptr<Operation>>
      unsaid_;  // this rank's, to be said in full in the next cycle
  std::vector<uint64_t> bits_, own_bits_;
  uint64_t hits_ = 0, misses_ = 0;
};

}  // namespace sparkvod
