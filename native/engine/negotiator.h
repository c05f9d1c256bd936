// Many tensors from many ranks -> one agreed order.
//
// Everything here is replicated: every rank sees the same lists in the same order and comes to the
// same decisions, so no rank directs the others. A request that was executed before and has not
// changed is one bit (the response cache); others travel in full once. A request that differs from
// its cached form evicts it on all ranks.
//
// Used by the holder of the driver token only.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "native/collectives/dissemination.h"
#include "native/collectives/notices.h"
#include "native/engine/members.h"
#include "native/engine/operation.h"

namespace sparkvod {

// What all ranks have asked for, but for those that have joined: this rank's operation, or what
// stands in for it, and every rank's request (empty when they disagree).
struct Agreed {
  std::shared_ptr<Operation> operation;
  std::shared_ptr<const std::vector<Request>> by_rank;
  Result error;          // kMismatch: the operation ends with it, the engine goes on
  int average_over = 1;  // ranks
  std::shared_ptr<const Members> members;
};

class Negotiator {
 public:
  // Lays down in a room of so many bytes what all ranks will need of an operation as soon as they
  // agree on it; false when there is nothing such.
  using Offer = std::function<bool(const Operation&, char* room, size_t bytes)>;
  Negotiator(Communicator* comm, size_t cache_capacity, Offer offer);

  struct Outcome {
    std::vector<Agreed> agreed;       // in the order in which all ranks execute them
    std::vector<const char*> offers;  // by rank, of the first; empty: some rank has none
    std::string shut_down;            // who ends the world and why; empty: nobody
    bool again = false;               // this rank has requests to say anew
    bool stalled = false;             // some rank warns of those that are late
  };
  // One cycle. `fresh` joins what is pending already, and is emptied.
  // `farewell`: why this rank ends the world; empty: it does not.
  Result Cycle(std::vector<std::shared_ptr<Operation>>* fresh, const std::string& farewell,
               Outcome* out);

  // Whether the others' collectives may need this rank although it has nothing to submit: there are
  // sets of ranks that it may be none of.
  bool attends() const { return sets_.size() > 1; }
  // True when a peer has begun the next cycle.
  Result PeerBegan(bool* began);
  // Operations that wait for other ranks.
  bool pending() const { return !waiting_.empty() || join_ != nullptr; }
  // Submission time of the oldest of them; INT64_MAX when there is none.
  int64_t oldest_ns() const;
  // Says the pending requests in full instead of by their bits, so that the next cycles show who is
  // missing. With `warn` all ranks learn that somebody warns.
  void Unmask(bool warn);
  // "'grad' (allreduce of ...) was not submitted by rank 3 on h, for which ranks 0,1 have waited 60
  // s", for the pending operations that are older than that. `led`: only those of which this rank
  // is the lowest that waits.
  std::string Missing(int64_t now_ns, bool led, int64_t older_than_ns) const;
  // "'grad' (allreduce of ...), for which ranks 0,1 wait", for what this rank has not submitted.
  std::string Awaited() const;
  // Takes all pending operations out, for the engine to fail them.
  std::vector<std::shared_ptr<Operation>> TakeAll();

  uint64_t cycles() const { return notices_ ? notices_->cycles() : dissemination_.cycles(); }
  uint64_t cache_hits() const { return hits_; }
  uint64_t cache_misses() const { return misses_; }

 private:
  struct Cached {
    std::string key;
    std::shared_ptr<const Members> members;
    std::shared_ptr<const std::vector<Request>> by_rank;  // null: a free slot
    std::list<size_t>::iterator age;
  };
  // What the ranks have said under one name so far.
  struct Said {
    std::shared_ptr<const Members> members;
    std::vector<Request> by_rank;
    std::vector<bool> said;
    int count = 0;
  };

  // The agreement of a cycle on flags_ and bits_.
  Result AgreeOnBits(uint16_t* flags, Outcome* out);
  // Offers the operation of the only bit; returns 1 + the bit, 0 when nothing was offered.
  uint32_t OfferOnly();
  void Begin(std::shared_ptr<Operation> operation);
  void Hear(int rank, Request request, Outcome* out);
  // What the ranks say that end the world in this cycle.
  Result HearFarewells(const std::string& own, Outcome* out);
  void HearJoin(int rank, Request request, Outcome* out);
  bool IsComplete(const Said& said) const;
  void Complete(const std::string& key, Said said, Outcome* out);
  // The sets change where the agreement on it stands among the others.
  Result AddSet(const Request& request, Operation* operation);
  Result RemoveSet(const Request& request, Outcome* out);
  void Refuse(const std::string& key, Outcome* out);
  // Adds to what is agreed. `absent`: the members that have joined without saying it; empty: none.
  void Agree(const std::string& key, const std::shared_ptr<const Members>& members,
             std::shared_ptr<const std::vector<Request>> by_rank, const std::vector<bool>& absent,
             Outcome* out);
  void Insert(const std::string& key, const std::shared_ptr<const Members>& members,
              std::shared_ptr<const std::vector<Request>> by_rank);
  void Evict(size_t slot);
  std::shared_ptr<Operation> TakeWaiting(const std::string& key);
  // The ranks that have said `said` in full, or have not: "ranks 0,1".
  std::string Ranks(const Said& said, bool have) const;

  Communicator* comm_;
  Offer offer_;
  std::unique_ptr<Notices> notices_;  // where these ranks can agree by them
  Dissemination dissemination_;       // else; and what is said in full
  size_t capacity_;
  std::vector<Cached> slots_;
  std::set<size_t> free_;   // slots that evictions left empty
  std::list<size_t> ages_;  // used slots, the least recently used first
  std::unordered_map<std::string, size_t> slot_of_;
  // By key. What some ranks have said in full, not yet all.
  std::map<std::string, Said> said_;
  std::unordered_map<std::string, std::shared_ptr<Operation>> waiting_;  // this rank's operations
  std::vector<std::shared_ptr<Operation>>
      unsaid_;  // this rank's, to be said in full in the next cycle
  std::vector<uint64_t> bits_, own_bits_;
  std::map<int32_t, std::shared_ptr<const Members>> sets_;  // 0: the world
  int32_t next_set_ = 1;
  std::vector<bool> joined_;      // by rank
  std::vector<Request> join_of_;  // by rank: with what it joined
  int joined_count_ = 0;
  int32_t average_over_ = kOverAll;  // as the first that joined has it
  std::shared_ptr<Operation> join_;  // this rank's
  int64_t active_ns_ = 0;            // when something was last agreed on since
  bool warn_ = false;                // in the next cycle
  uint64_t hits_ = 0, misses_ = 0;
  Result broken_;  // why this rank can go on no longer
};

}  // namespace sparkvod
