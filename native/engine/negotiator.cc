#include "native/engine/negotiator.h"

#include <algorithm>
#include <cstdio>

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

Negotiator::Negotiator(Communicator* comm, size_t cache_capacity)
    : comm_(comm),
      dissemination_(comm),
      capacity_(cache_capacity),
      joined_(static_cast<size_t>(comm->size())),
      join_of_(static_cast<size_t>(comm->size())) {}

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
  const auto slot = slot_of_.find(request.name);
  const auto me = static_cast<size_t>(comm_->rank());
  if (slot != slot_of_.end() && !joined_[me] && join_ == nullptr &&
      (*slots_[slot->second].by_rank)[me] == request) {
    Set(&own_bits_, slot->second);
    ++hits_;
  } else {
    unsaid_.push_back(operation);
    ++misses_;
  }
  waiting_.emplace(request.name, std::move(operation));
}

Result Negotiator::Cycle(std::vector<std::shared_ptr<Operation>> fresh, bool shut_down,
                         Outcome* out) {
  comm_->Describe("negotiation");
  for (std::shared_ptr<Operation>& operation : fresh) Begin(std::move(operation));
  uint16_t flags = static_cast<uint16_t>((shut_down ? kShutDown : 0) |
                                         (unsaid_.empty() ? 0 : kUnsaid) | (warn_ ? kStalled : 0));
  warn_ = false;
  bits_ = own_bits_;
  if (joined_[static_cast<size_t>(comm_->rank())])
    for (const size_t slot : ages_) Set(&bits_, slot);
  SPARKVOD_TRY(dissemination_.Agree(&flags, &bits_));

  for (size_t word = 0; word < bits_.size(); ++word)
    for (uint64_t left = bits_[word]; left != 0; left &= left - 1) {
      const size_t slot = word * 64 + static_cast<size_t>(__builtin_ctzll(left));
      Clear(&own_bits_, slot);
      ages_.splice(ages_.end(), ages_, slots_[slot].age);
      Agree(slots_[slot].by_rank, joined_count_ > 0 ? joined_ : std::vector<bool>(), out);
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
          return Result::Fail(Code::kPeerLost,
                              comm_->world().Name(r) + " sent " + decoded.Report());
        Hear(r, std::move(request), out);
      }
    }
  }
  out->shut_down = (flags & kShutDown) != 0;
  out->stalled = (flags & kStalled) != 0;
  out->again = out->again || !unsaid_.empty();
  if (join_ != nullptr && !out->agreed.empty()) active_ns_ = NowNs();
  return {};
}

void Negotiator::Hear(int rank, Request request, Outcome* out) {
  if (request.collective == Collective::kJoin) return HearJoin(rank, std::move(request), out);
  const std::string name = request.name;
  if (const auto slot = slot_of_.find(name); slot != slot_of_.end()) Evict(slot->second);
  Said& said = said_[name];
  if (said.said.empty()) {
    said.by_rank.resize(static_cast<size_t>(comm_->size()));
    said.said.resize(static_cast<size_t>(comm_->size()));
  }
  const auto r = static_cast<size_t>(rank);
  if (!said.said[r]) ++said.count;
  said.said[r] = true;
  said.by_rank[r] = std::move(request);
  if (!IsComplete(said)) return;
  Said complete = std::move(said);
  said_.erase(name);
  Complete(name, std::move(complete), out);
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
  Result error = CheckAgreement(join_of_);
  out->agreed.push_back({std::move(join_), std::make_shared<const std::vector<Request>>(join_of_),
                         std::move(error), comm_->size()});
  join_ = nullptr;
  joined_.assign(joined_.size(), false);
  joined_count_ = 0;
}

bool Negotiator::IsComplete(const Said& said) const {
  if (joined_count_ == 0) return said.count == comm_->size();
  for (size_t r = 0; r < said.said.size(); ++r)
    if (!said.said[r] && !joined_[r]) return false;
  return true;
}

void Negotiator::Complete(const std::string& name, Said said, Outcome* out) {
  std::vector<bool> absent;
  if (said.count < comm_->size()) {
    absent = said.said;
    absent.flip();
    const auto first = std::find(said.said.begin(), said.said.end(), true) - said.said.begin();
    for (size_t r = 0; r < absent.size(); ++r)
      if (absent[r]) said.by_rank[r] = StandInRequest(said.by_rank[static_cast<size_t>(first)]);
  }
  Result error = CheckAgreement(said.by_rank);
  auto by_rank = std::make_shared<const std::vector<Request>>(std::move(said.by_rank));
  if (error.ok()) {
    Insert(name, by_rank);
    Agree(std::move(by_rank), absent, out);
  } else if (std::shared_ptr<Operation> own = TakeWaiting(name); own != nullptr) {
    out->agreed.push_back({std::move(own), std::move(by_rank), std::move(error), comm_->size()});
  }
}

void Negotiator::Agree(std::shared_ptr<const std::vector<Request>> by_rank,
                       const std::vector<bool>& absent, Outcome* out) {
  const std::string name = (*by_rank)[0].name;
  if (absent.empty()) {
    out->agreed.push_back({TakeWaiting(name), std::move(by_rank), {}, comm_->size()});
    return;
  }
  // What was cached may say what the absent ranks asked for when they were there.
  std::vector<Request> requests = *by_rank;
  const auto first = std::find(absent.begin(), absent.end(), false) - absent.begin();
  for (size_t r = 0; r < absent.size(); ++r)
    if (absent[r]) requests[r] = StandInRequest(requests[static_cast<size_t>(first)]);
  Result error = CheckAbsent(requests, absent);
  const auto me = static_cast<size_t>(comm_->rank());
  std::shared_ptr<Operation> operation =
      absent[me] ? StandIn(requests[me], comm_->rank(), comm_->size()) : TakeWaiting(name);
  const auto active = std::count(absent.begin(), absent.end(), false);
  out->agreed.push_back(
      {std::move(operation), std::make_shared<const std::vector<Request>>(std::move(requests)),
       std::move(error), average_over_ == kOverActive ? static_cast<int>(active) : comm_->size()});
}

void Negotiator::Insert(const std::string& name,
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
  slots_[slot] = {std::move(by_rank), ages_.insert(ages_.end(), slot)};
  slot_of_[name] = slot;
  own_bits_.resize((slots_.size() + 63) / 64);
}

void Negotiator::Evict(size_t slot) {
  const std::string name = (*slots_[slot].by_rank)[0].name;
  if (Test(own_bits_, slot)) {
    // This rank waits with a bit that means nothing any more.
    Clear(&own_bits_, slot);
    unsaid_.push_back(waiting_.at(name));
  }
  slot_of_.erase(name);
  ages_.erase(slots_[slot].age);
  slots_[slot] = {};
  free_.insert(slot);
}

std::shared_ptr<Operation> Negotiator::TakeWaiting(const std::string& name) {
  const auto it = waiting_.find(name);
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
    if (said.said[r] != have || (!have && joined_[r])) continue;
    // Those that are missing are looked for, so they come with their hosts.
    ranks += count++ == 0 ? "" : have ? "," : ", ";
    ranks += have ? std::to_string(r) : comm_->world().Name(static_cast<int>(r));
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
      if (first - said->second.said.begin() != comm_->rank()) continue;
    }
    if (++found > kShown) continue;
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%.3g", static_cast<double>(age_ns) * 1e-9);
    text += (text.empty() ? "'" : "; '") + name + "' (" + operation->request.Describe() + ")";
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
      if (!joined_[r]) text += (count++ > 0 ? ", " : "") + comm_->world().Name(static_cast<int>(r));
    text +=
        ", which " + std::string(count == 1 ? "has" : "have") + " submitted nothing else either";
  }
  return text;
}

std::string Negotiator::Awaited() const {
  std::string text;
  constexpr int kShown = 5;
  int found = 0;
  const auto me = static_cast<size_t>(comm_->rank());
  for (const auto& [name, said] : said_) {
    if (said.said[me] || ++found > kShown) continue;
    const auto first = std::find(said.said.begin(), said.said.end(), true);
    const Request& request = said.by_rank[static_cast<size_t>(first - said.said.begin())];
    text += (text.empty() ? "'" : "; '") + name + "' (" + request.Describe() + "), for which " +
            Ranks(said, true) + (said.count == 1 ? " waits" : " wait");
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
