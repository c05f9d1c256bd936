#include "native/engine/negotiator.h"

#include <algorithm>
#include <cstdio>
#include <iterator>

#include "native/engine/standin.h"

namespace sparkvod {
namespace {

enum Flags : uint16_t { kShutDown = 1, kUnsaid = 2, kStalled = 4 };

bool Test(const std::vector<uint64_t>& bits, size_t i) {
  return (bits[i / 64] >> (i % 64) & 1) != 0;
}
void Set(std::vector<uint64_t>* bits, size_t i) { (*bits)[i / 64] |= uint64_t{1} << (i % 64); }
void Clear(std::vector<uint64_t>* bits, size_t i) { (*bits)[i / 64] &= ~(uint64_t{1} << (i % 64)); }

}  // namespace

Negotiator::Negotiator(Communicator* comm, size_t cache_capacity, Offer offer)
    : comm_(comm),
      offer_(std::move(offer)),
      notices_(Notices::Serve(*comm, cache_capacity) ? std::make_unique<Notices>(comm) : nullptr),
      dissemination_(comm),
      capacity_(cache_capacity),
      joined_(static_cast<size_t>(comm->size())),
      join_of_(static_cast<size_t>(comm->size())) {
  Members world;
  for (int r = 0; r < comm->size(); ++r) world.ranks.push_back(r);
  world.place = comm->rank();
  sets_[0] = std::make_shared<const Members>(std::move(world));
}

Result Negotiator::PeerBegan(bool* began) {
  if (notices_ == nullptr) return dissemination_.PeerBegan(began);
  *began = notices_->PeerBegan();
  return {};
}

uint32_t Negotiator::OfferOnly() {
  if (joined_count_ > 0) return 0;
  size_t count = 0, slot = 0;
  for (size_t word = 0; word < bits_.size(); ++word)
    if (bits_[word] != 0) {
      count += static_cast<size_t>(__builtin_popcountll(bits_[word]));
      slot = word * 64 + static_cast<size_t>(__builtin_ctzll(bits_[word]));
    }
  if (count != 1 || slots_[slot].members->place < 0) return 0;
  const Operation& operation = *waiting_.at(slots_[slot].key);
  const bool offered = offer_(operation, notices_->room(bits_.size()), Notices::kRoomBytes);
  return offered ? static_cast<uint32_t>(slot) + 1 : 0;
}

Result Negotiator::AgreeOnBits(uint16_t* flags, Outcome* out) {
  if (notices_ == nullptr) return dissemination_.Agree(flags, &bits_);
  uint32_t offer = OfferOnly();
  SPARKVOD_TRY(notices_->Agree(flags, &bits_, &offer));
  if (offer != 0)
    for (int r = 0; r < comm_->size(); ++r) out->offers.push_back(notices_->data(r, bits_.size()));
  return {};
}

void Negotiator::Begin(std::shared_ptr<Operation> operation) {
  const Request& request = operation->request;
  if (request.collective == Collective::kJoin) {
    // The others must know what this rank has submitted before, since from now on its bits say that
    // it does not mind.
    Unmask(false);
    join_ = operation;
    unsaid_.push_back(std::move(operation));
    return;
  }
  const std::string& key = operation->key;
  const auto slot = slot_of_.find(key);
  const auto may_hit = [&] {
    const Cached& cached = slots_[slot->second];
    return cached.members->place >= 0 && join_ == nullptr &&
           (*cached.by_rank)[static_cast<size_t>(cached.members->place)] == request;
  };
  if (slot != slot_of_.end() && may_hit()) {
    Set(&own_bits_, slot->second);
    ++hits_;
  } else {
    unsaid_.push_back(operation);
    ++misses_;
  }
  waiting_.emplace(key, std::move(operation));
}

Result Negotiator::Cycle(std::vector<std::shared_ptr<Operation>>* fresh,
                         const std::string& farewell, Outcome* out) {
  comm_->Describe("negotiation");
  for (std::shared_ptr<Operation>& operation : *fresh) Begin(std::move(operation));
  fresh->clear();
  uint16_t flags = static_cast<uint16_t>((farewell.empty() ? 0 : kShutDown) |
                                         (unsaid_.empty() ? 0 : kUnsaid) | (warn_ ? kStalled : 0));
  warn_ = false;
  bits_ = own_bits_;
  if (joined_[static_cast<size_t>(comm_->rank())])
    for (const size_t slot : ages_) Set(&bits_, slot);
  SPARKVOD_TRY(AgreeOnBits(&flags, out));

  for (size_t word = 0; word < bits_.size(); ++word)
    for (uint64_t left = bits_[word]; left != 0; left &= left - 1) {
      const size_t slot = word * 64 + static_cast<size_t>(__builtin_ctzll(left));
      const Cached& cached = slots_[slot];
      // The bits of sets that this rank is none of stay as they are.
      if (cached.members->place >= 0) Clear(&own_bits_, slot);
      ages_.splice(ages_.end(), ages_, cached.age);
      std::vector<bool> absent;
      if (joined_count_ > 0)
        for (const int r : cached.members->ranks) absent.push_back(joined_[static_cast<size_t>(r)]);
      if (std::find(absent.begin(), absent.end(), true) == absent.end()) absent.clear();
      Agree(cached.key, cached.members, cached.by_rank, absent, out);
    }
  if ((flags & kUnsaid) != 0) {
    Writer own;
    own.Put(static_cast<uint32_t>(unsaid_.size()));
    for (const auto& operation : unsaid_) Encode(operation->request, &own);
    unsaid_.clear();
    std::vector<std::string> all;
    SPARKVOD_TRY(dissemination_.Allgather(own.bytes(), &all));
    for (int r = 0; r < comm_->size(); ++r) {
      Reader reader(all[static_cast<size_t>(r)]);
      const size_t count = reader.GetCount(1);
      for (size_t i = 0; i < count; ++i) {
        Request request;
        if (Result decoded = Decode(&reader, &request); !decoded.ok())
          return Result::Fail(Code::kPeerLost, comm_->Name(r) + " sent " + decoded.Report());
        Hear(r, std::move(request), out);
      }
    }
  }
  if (!broken_.ok()) return broken_;
  if ((flags & kShutDown) != 0) SPARKVOD_TRY(HearFarewells(farewell, out));
  out->stalled = (flags & kStalled) != 0;
  out->again = out->again || !unsaid_.empty();
  if (join_ != nullptr && !out->agreed.empty()) active_ns_ = NowNs();
  return {};
}

Result Negotiator::HearFarewells(const std::string& own, Outcome* out) {
  std::vector<std::string> all;
  SPARKVOD_TRY(dissemination_.Allgather(own.substr(0, kCauseLimit), &all));
  for (int r = 0; r < comm_->size() && out->shut_down.empty(); ++r) {
    const std::string& words = all[static_cast<size_t>(r)];
    if (!words.empty()) out->shut_down = comm_->Name(r) + " left the world: " + words;
  }
  return {};
}

void Negotiator::Hear(int rank, Request request, Outcome* out) {
  if (request.collective == Collective::kJoin) return HearJoin(rank, std::move(request), out);
  const std::string key = request.key();
  const auto set = sets_.find(request.process_set);
  const int place = set == sets_.end() ? -1 : set->second->PlaceOf(rank);
  if (place < 0) {
    // Submitted while the set was being removed.
    if (rank == comm_->rank()) Refuse(key, out);
    return;
  }
  if (const auto slot = slot_of_.find(key); slot != slot_of_.end()) Evict(slot->second);
  Said& said = said_[key];
  if (said.said.empty()) {
    said.members = set->second;
    said.by_rank.resize(said.members->ranks.size());
    said.said.resize(said.members->ranks.size());
  }
  const auto r = static_cast<size_t>(place);
  if (!said.said[r]) ++said.count;
  said.said[r] = true;
  // A tune may be one rank's word, which the others take as their own.
  const bool enough = request.collective == Collective::kTune && request.root == rank;
  said.by_rank[r] = std::move(request);
  if (!enough && !IsComplete(said)) return;
  Said complete = std::move(said);
  said_.erase(key);
  Complete(key, std::move(complete), out);
}

// This rank's operation of a set that is gone.
void Negotiator::Refuse(const std::string& key, Outcome* out) {
  std::shared_ptr<Operation> operation = TakeWaiting(key);
  if (operation == nullptr) return;
  const Request& request = operation->request;
  Result error =
      Result::Fail(Code::kMismatch, "process set " + std::to_string(request.process_set) +
                                        " was removed while '" + request.name +
                                        "' was pending; wait for all collectives of a set before");
  out->agreed.push_back({std::move(operation), nullptr, std::move(error), 1, nullptr});
}

// What the others have submitted already may have waited for this rank only.
void Negotiator::HearJoin(int rank, Request request, Outcome* out) {
  if (joined_count_ == 0) average_over_ = request.root;
  const auto r = static_cast<size_t>(rank);
  if (!joined_[r]) ++joined_count_;
  joined_[r] = true;
  join_of_[r] = std::move(request);
  for (auto it = said_.begin(); it != said_.end();) {
    if (!IsComplete(it->second)) {
      ++it;
      continue;
    }
    const std::string name = it->first;
    Said complete = std::move(it->second);
    it = said_.erase(it);
    Complete(name, std::move(complete), out);
  }
  // Another cycle, in which this rank's bits no longer keep the others waiting.
  out->again = true;
  if (joined_count_ < comm_->size()) return;
  if (join_ != nullptr) join_->last_joined = rank;
  Result error = CheckAgreement(join_of_, sets_[0]->ranks);
  out->agreed.push_back({std::move(join_), std::make_shared<const std::vector<Request>>(join_of_),
                         std::move(error), comm_->size(), sets_[0]});
  join_ = nullptr;
  joined_.assign(joined_.size(), false);
  joined_count_ = 0;
}

bool Negotiator::IsComplete(const Said& said) const {
  if (joined_count_ == 0) return said.count == said.members->size();
  for (size_t r = 0; r < said.said.size(); ++r)
    if (!said.said[r] && !joined_[static_cast<size_t>(said.members->ranks[r])]) return false;
  return true;
}

void Negotiator::Complete(const std::string& key, Said said, Outcome* out) {
  std::vector<bool> absent;
  if (said.count < said.members->size()) {
    absent = said.said;
    absent.flip();
    const auto first = std::find(said.said.begin(), said.said.end(), true) - said.said.begin();
    for (size_t r = 0; r < absent.size(); ++r)
      if (absent[r]) said.by_rank[r] = StandInRequest(said.by_rank[static_cast<size_t>(first)]);
  }
  Result error = CheckAgreement(said.by_rank, said.members->ranks, absent);
  auto by_rank = std::make_shared<const std::vector<Request>>(std::move(said.by_rank));
  if (error.ok()) {
    const Collective collective = (*by_rank)[0].collective;
    if (HasTensors(collective) || collective == Collective::kBarrier)
      Insert(key, said.members, by_rank);
    Agree(key, said.members, std::move(by_rank), absent, out);
  } else if (std::shared_ptr<Operation> own = TakeWaiting(key); own != nullptr) {
    out->agreed.push_back({std::move(own), std::move(by_rank), std::move(error), 1, said.members});
  }
}

void Negotiator::Agree(const std::string& key, const std::shared_ptr<const Members>& members,
                       std::shared_ptr<const std::vector<Request>> by_rank,
                       const std::vector<bool>& absent, Outcome* out) {
  Agreed agreed{nullptr, std::move(by_rank), {}, members->size(), members};
  if (absent.empty()) {
    agreed.operation = TakeWaiting(key);
  } else {
    // What was cached may say what the absent ranks asked for when they were there.
    std::vector<Request> requests = *agreed.by_rank;
    const auto first = std::find(absent.begin(), absent.end(), false) - absent.begin();
    if (first == static_cast<std::ptrdiff_t>(absent.size())) return;  // nobody asked for it
    for (size_t r = 0; r < absent.size(); ++r)
      if (absent[r]) requests[r] = StandInRequest(requests[static_cast<size_t>(first)]);
    agreed.error = CheckAbsent(requests, absent, *members);
    if (members->place >= 0) {
      const auto me = static_cast<size_t>(members->place);
      if (!absent[me]) {
        agreed.operation = TakeWaiting(key);
      } else if (Result r =
                     StandIn(requests[me], members->place, members->size(), &agreed.operation);
                 !r.ok()) {
        broken_ = r;
        return;
      }
    }
    if (average_over_ == kOverActive)
      agreed.average_over = static_cast<int>(std::count(absent.begin(), absent.end(), false));
    agreed.by_rank = std::make_shared<const std::vector<Request>>(std::move(requests));
  }
  const Request& request = (*agreed.by_rank)[0];
  if (agreed.error.ok() && request.collective == Collective::kAddSet)
    agreed.error = AddSet(request, agreed.operation.get());
  if (agreed.error.ok() && request.collective == Collective::kRemoveSet)
    agreed.error = RemoveSet(request, out);
  if (members->place >= 0) out->agreed.push_back(std::move(agreed));
}

Result Negotiator::AddSet(const Request& request, Operation* operation) {
  Members members;
  for (const int64_t r : request.splits) members.ranks.push_back(static_cast<int>(r));
  const auto same = std::find_if(sets_.begin(), sets_.end(), [&](const auto& set) {
    return set.second->ranks == members.ranks;
  });
  if (same != sets_.end())
    return Result::Fail(Code::kInvalid, "process set " + std::to_string(same->first) +
                                            " has the ranks " + members.Text() +
                                            " already; use it, or remove it before");
  members.id = next_set_++;
  members.place = members.PlaceOf(comm_->rank());
  if (operation != nullptr) operation->set = std::make_shared<const Members>(members);
  const auto id = members.id;
  sets_[id] = std::make_shared<const Members>(std::move(members));
  return {};
}

Result Negotiator::RemoveSet(const Request& request, Outcome* out) {
  const auto set = sets_.find(request.root);
  if (request.root == 0 || set == sets_.end())
    return Result::Fail(Code::kInvalid, "process set " + std::to_string(request.root) +
                                            " is not there, or is the global one; only a set that "
                                            "was added can be removed");
  sets_.erase(set);
  for (size_t slot = 0; slot < slots_.size(); ++slot)
    if (slots_[slot].by_rank != nullptr && slots_[slot].members->id == request.root) {
      Clear(&own_bits_, slot);
      Evict(slot);
    }
  for (auto it = said_.begin(); it != said_.end();)
    it = it->second.members->id == request.root ? said_.erase(it) : std::next(it);
  std::vector<std::string> pending;
  for (const auto& [key, operation] : waiting_)
    if (operation->request.process_set == request.root) pending.push_back(key);
  for (const std::string& key : pending) Refuse(key, out);
  const auto gone = [&](const auto& o) { return o->request.process_set == request.root; };
  unsaid_.erase(std::remove_if(unsaid_.begin(), unsaid_.end(), gone), unsaid_.end());
  return {};
}

void Negotiator::Insert(const std::string& key, const std::shared_ptr<const Members>& members,
                        std::shared_ptr<const std::vector<Request>> by_rank) {
  if (capacity_ == 0) return;
  if (free_.empty() && slots_.size() == capacity_) Evict(ages_.front());
  size_t slot = slots_.size();
  if (free_.empty()) {
    slots_.emplace_back();
  } else {
    slot = *free_.begin();
    free_.erase(free_.begin());
  }
  slots_[slot] = {key, members, std::move(by_rank), ages_.insert(ages_.end(), slot)};
  slot_of_[key] = slot;
  own_bits_.resize((slots_.size() + 63) / 64);
  // A rank that a set does without never keeps it waiting.
  if (members->place < 0) Set(&own_bits_, slot);
}

void Negotiator::Evict(size_t slot) {
  const std::string key = slots_[slot].key;
  if (Test(own_bits_, slot)) {
    Clear(&own_bits_, slot);
    // This rank waits with a bit that means nothing any more.
    if (slots_[slot].members->place >= 0) unsaid_.push_back(waiting_.at(key));
  }
  slot_of_.erase(key);
  ages_.erase(slots_[slot].age);
  slots_[slot] = {};
  free_.insert(slot);
}

std::shared_ptr<Operation> Negotiator::TakeWaiting(const std::string& key) {
  const auto it = waiting_.find(key);
  if (it == waiting_.end()) return nullptr;
  std::shared_ptr<Operation> operation = std::move(it->second);
  waiting_.erase(it);
  return operation;
}

int64_t Negotiator::oldest_ns() const {
  int64_t oldest = INT64_MAX;
  for (const auto& [name, operation] : waiting_) oldest = std::min(oldest, operation->submitted_ns);
  // Who has joined waits for as long as the others go on.
  if (join_ != nullptr) oldest = std::min(oldest, std::max(join_->submitted_ns, active_ns_));
  return oldest;
}

void Negotiator::Unmask(bool warn) {
  warn_ = warn_ || warn;
  for (const auto& [name, operation] : waiting_) {
    const auto slot = slot_of_.find(name);
    if (slot == slot_of_.end() || !Test(own_bits_, slot->second)) continue;
    Clear(&own_bits_, slot->second);
    unsaid_.push_back(operation);
  }
}

std::string Negotiator::Ranks(const Said& said, bool have) const {
  std::string ranks;
  int count = 0;
  for (size_t r = 0; r < said.said.size(); ++r) {
    const int rank = said.members->ranks[r];
    if (said.said[r] != have || (!have && joined_[static_cast<size_t>(rank)])) continue;
    // Those that are missing are looked for, so they come with their hosts.
    ranks += count++ == 0 ? "" : have ? "," : ", ";
    ranks += have ? std::to_string(rank) : comm_->Name(rank);
  }
  return have ? (count == 1 ? "rank " : "ranks ") + ranks : ranks;
}

std::string Negotiator::Missing(int64_t now_ns, bool led, int64_t older_than_ns) const {
  std::string text;
  constexpr int kShown = 5;
  int found = 0;
  for (const auto& [name, operation] : waiting_) {
    const int64_t age_ns = now_ns - operation->submitted_ns;
    if (age_ns < older_than_ns) continue;
    const auto said = said_.find(name);
    if (led) {
      if (said == said_.end()) continue;
      const auto first = std::find(said->second.said.begin(), said->second.said.end(), true);
      if (first - said->second.said.begin() != said->second.members->place) continue;
    }
    if (++found > kShown) continue;
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%.3g", static_cast<double>(age_ns) * 1e-9);
    text += (text.empty() ? "'" : "; '") + operation->request.name + "' (" +
            operation->request.Describe() + ")";
    if (said == said_.end())
      text += std::string(" has waited ") + seconds + " s";
    else
      text += " was not submitted by " + Ranks(said->second, false) + ", for which " +
              Ranks(said->second, true) + (said->second.count == 1 ? " has" : " have") +
              " waited " + seconds + " s";
  }
  if (found > kShown) text += "; and " + std::to_string(found - kShown) + " more";
  if (join_ != nullptr && found == 0 && !led) {
    text += "join was not called by ";
    int count = 0;
    for (size_t r = 0; r < joined_.size(); ++r)
      if (!joined_[r]) text += (count++ > 0 ? ", " : "") + comm_->Name(static_cast<int>(r));
    text +=
        ", which " + std::string(count == 1 ? "has" : "have") + " submitted nothing else either";
  }
  return text;
}

std::string Negotiator::Awaited() const {
  if (joined_[static_cast<size_t>(comm_->rank())]) return {};
  std::string text;
  constexpr int kShown = 5;
  int found = 0;
  for (const auto& [key, said] : said_) {
    const int place = said.members->place;
    if (place < 0 || said.said[static_cast<size_t>(place)] || ++found > kShown) continue;
    const auto first = std::find(said.said.begin(), said.said.end(), true);
    const Request& request = said.by_rank[static_cast<size_t>(first - said.said.begin())];
    text += (text.empty() ? "'" : "; '") + request.name + "' (" + request.Describe() +
            "), for which " + Ranks(said, true) + (said.count == 1 ? " waits" : " wait");
  }
  return found > kShown ? text + "; and " + std::to_string(found - kShown) + " more" : text;
}

std::vector<std::shared_ptr<Operation>> Negotiator::TakeAll() {
  std::vector<std::shared_ptr<Operation>> all;
  for (auto& [name, operation] : waiting_) all.push_back(std::move(operation));
  if (join_ != nullptr) all.push_back(std::move(join_));
  join_ = nullptr;
  waiting_.clear();
  unsaid_.clear();
  said_.clear();
  return all;
}

}  // namespace sparkvod
