#include "native/collectives/communicator.h"

#include <poll.h>

#include <algorithm>
#include <cstdio>
#include <set>

namespace sparkvod {
namespace {
constexpr double kLastWordsSeconds = 0.1;
}  // namespace

Communicator::Communicator(World* world, const Config& config, std::function<Result()> health)
    : world_(world),
      topology_(world->topology),
      arenas_(world->local_arenas),
      health_(std::move(health)),
      cores_(world->local_arenas, world->topology.local_rank),
      timeout_(config.collective_timeout),
      warn_after_(config.stall_check_time_seconds),
      log_(config.log_level, "rank " + std::to_string(world->topology.rank)) {
  // Ranks that outnumber the cores would spin away the time of those that they wait for, so they
  // offer the core at each look. Where it goes round among many of them, most looks are in vain.
  const int cores = Cores::Usable();
  crowded_ = topology_.local_size > cores;
  spin_ns_ = topology_.local_size > kMostRanksPerCore * cores ? 0 : config.spin_us * 1000;
  for (int r = 0; r < topology_.size; ++r) ranks_.push_back(r);
  for (Arena* arena : arenas_)
    lanes_.push_back({&arena->header().phase, arena->slot(0), arena->staging()});
  FindTransport();
}

Communicator::Communicator(const Communicator& world, const std::vector<int>& ranks)
    : world_(world.world_),
      timeline_(world.timeline_),
      ranks_(ranks),
      health_(world.health_),
      cores_(world.cores_),
      spin_ns_(world.spin_ns_),
      crowded_(world.crowded_),
      patient_(world.patient_),
      lost_(world.lost_),
      timeout_(world.timeout_),
      warn_after_(world.warn_after_),
      log_(world.log_) {
  std::vector<std::string> ids, hosts;
  for (const int r : ranks) {
    ids.push_back(world.topology_.host_ids[static_cast<size_t>(r)]);
    hosts.push_back(world.topology_.hosts[static_cast<size_t>(r)]);
  }
  const auto me = std::find(ranks.begin(), ranks.end(), world.rank());
  topology_ = MakeTopology(static_cast<int>(me - ranks.begin()), ids, hosts);
  if (!world_->local_arenas.empty())
    for (const int local : topology_.local_ranks) {
      const int r = ranks_[static_cast<size_t>(local)];
      arenas_.push_back(r == world.rank() ? world_->arena.get()
                                          : world_->peers[static_cast<size_t>(r)].arena.get());
    }
  FindTransport();
}

void Communicator::FindTransport() {
  std::set<std::string> names;
  for (const int r : ranks_)
    if (const Peer& peer = world_->peers[static_cast<size_t>(r)]; peer.channel != nullptr)
      names.insert(peer.channel->transport());
  for (const std::string& name : names) transport_ += (transport_.empty() ? "" : "+") + name;
  if (transport_.empty()) transport_ = "none";
}

size_t Communicator::LaneBytes() const {
  return kCacheLine + 2 * Geometry::kSlotBytes + staging_bytes();
}

void Communicator::MoveIn(const std::vector<int64_t>& offsets) {
  for (size_t l = 0; l < arenas_.size(); ++l) {
    char* const lane = arenas_[l]->base() + offsets[static_cast<size_t>(topology_.local_ranks[l])];
    char* const slots = lane + kCacheLine;
    lanes_.push_back(
        {reinterpret_cast<std::atomic<uint64_t>*>(lane), slots, slots + 2 * Geometry::kSlotBytes});
  }
}

Result Communicator::TrySend(int to, const void* data, size_t bytes, size_t* moved, Step* step) {
  if (*moved >= bytes) return {};
  size_t n = 0;
  const char* const left = static_cast<const char*>(data) + *moved;
  if (Result r = channel(to).TrySend(left, bytes - *moved, &n); !r.ok()) return Blame(to, r);
  *moved += n;
  if (n > 0) *step = Step::kMoved;
  return {};
}

Result Communicator::TryRecv(int from, void* data, size_t bytes, size_t* moved, Step* step) {
  if (*moved >= bytes) return {};
  size_t n = 0;
  char* const left = static_cast<char*>(data) + *moved;
  if (Result r = channel(from).TryRecv(left, bytes - *moved, &n); !r.ok()) return Blame(from, r);
  *moved += n;
  if (n > 0) *step = Step::kMoved;
  return {};
}

Result Communicator::SendRecv(int to, const void* out, size_t out_bytes, int from, void* in,
                              size_t in_bytes) {
  size_t sent = 0, received = 0;
  int awaited = in_bytes > 0 ? from : to;
  return Progress(kForMessage, awaited, [&](Step* step) -> Result {
    *step = Step::kStuck;
    SPARKVOD_TRY(TrySend(to, out, out_bytes, &sent, step));
    SPARKVOD_TRY(TryRecv(from, in, in_bytes, &received, step));
    awaited = received < in_bytes ? from : to;  // who does not read, when all has come
    if (sent == out_bytes && received == in_bytes) *step = Step::kDone;
    return {};
  });
}

std::string Communicator::doing() const {
  if (tensor_ == nullptr) return doing_;
  return doing_ + " of '" + *tensor_ + "'" +
         (others_ > 0 ? " and " + std::to_string(others_) + " more" : "");
}

uint64_t Communicator::Arrive() {
  // Sequentially consistent, as are the loads of `sleeper` in RingForPhase and of `phase` in
  // AwaitPhase.
  lanes_[static_cast<size_t>(local_rank())].phase->store(++phase_);
  for (int l = 0; l < local_size(); ++l)
    if (l != local_rank()) arena(l).RingForPhase();
  return phase_;
}

Result Communicator::AwaitPhase(uint64_t phase) {
  const Phase waiting(timeline_, "wait for ranks");
  int next = 0;
  return Progress(kForPhase, -1, [&](Step* step) -> Result {
    *step = Step::kStuck;
    for (; next < local_size(); ++next) {
      if (next == local_rank()) continue;
      if (lanes_[static_cast<size_t>(next)].phase->load() < phase) return {};
      *step = Step::kMoved;
    }
    *step = Step::kDone;
    return {};
  });
}

Result Communicator::AwaitPhaseOf(int local_rank, uint64_t phase) {
  const Phase waiting(timeline_, "wait for a rank");
  const std::atomic<uint64_t>& theirs = *lanes_[static_cast<size_t>(local_rank)].phase;
  const int peer = topology_.local_ranks[static_cast<size_t>(local_rank)];
  return Progress(kForPhase, peer, [&](Step* step) -> Result {
    *step = theirs.load() < phase ? Step::kStuck : Step::kDone;
    return {};
  });
}

Result Communicator::Lost(int peer, const Departure& how) const {
  const std::string who = world_->Name(peer);
  if (how.orderly)
    return Result::Fail(Code::kShutDown, who + " shut down during " + doing() +
                                             "; all ranks must make the same calls");
  if (how.relayed) return Result::Fail(how.code, how.cause);
  return Result::Fail(how.code, who + " left during " + doing() + ": " + how.cause);
}

Result Communicator::CheckPeers(bool thorough) {
  const uint32_t departures = world_->arena->header().departures.load();
  thorough = thorough || lost_;
  if (!thorough && departures == departures_) return {};
  for (int r = 0; r < world_->topology.size; ++r) {
    const Peer& peer = world_->peers[static_cast<size_t>(r)];
    if (peer.link == nullptr) continue;
    if (!thorough && (peer.arena == nullptr || peer.arena->header().left.load() == 0)) continue;
    Departure how;
    // Whoever leaves in order has sent all that the others still need, so they do not mind.
    if (peer.link->Left(&how) && !how.orderly) {
      lost_ = true;
      return Lost(r, how);
    }
  }
  departures_ = departures;
  return {};
}

Result Communicator::Blame(int peer, const Result& cause) {
  const int r = ranks_[static_cast<size_t>(peer)];
  Link& link = *world_->peers[static_cast<size_t>(r)].link;
  Departure how;
  // Why a peer has left may come a moment after its bytes have ended.
  for (const Deadline deadline = Deadline::After(kLastWordsSeconds);;) {
    if (link.Left(&how)) return Lost(r, how);
    if (deadline.Passed() || link.fd() < 0) break;
    pollfd news{link.fd(), POLLIN, 0};
    ::poll(&news, 1, deadline.LeftMs(5));
  }
  return Result::Fail(Code::kPeerLost,
                      Name(peer) + " was lost during " + doing() + ": " + cause.Report());
}

void Communicator::PublishWait(int peer) {
  const auto world_rank =
      peer < 0 ? 0 : static_cast<uint32_t>(ranks_[static_cast<size_t>(peer)]) + 1;
  world_->arena->header().waits_for.store(world_rank);
}

std::string Communicator::Awaited(int peer) const {
  const std::vector<int>& local = topology_.local_ranks;
  const auto found = std::find(local.begin(), local.end(), peer);
  if (found == local.end() || arenas_.empty()) return Name(peer);
  const uint32_t next =
      arenas_[static_cast<size_t>(found - local.begin())]->header().waits_for.load();
  const auto by = std::find(ranks_.begin(), ranks_.end(), static_cast<int>(next) - 1);
  const auto whom = static_cast<int>(by - ranks_.begin());
  if (next == 0 || by == ranks_.end() || whom == rank() || whom == peer) return Name(peer);
  return Name(peer) + " (which waits for " + Name(whom) + ")";
}

std::string Communicator::Waited(int peer, double seconds) const {
  std::string whom;
  if (peer >= 0) {
    whom = Awaited(peer);
  } else {
    for (int l = 0; l < local_size(); ++l)
      if (lanes_[static_cast<size_t>(l)].phase->load() < phase_)
        whom += (whom.empty() ? "" : ", ") + Awaited(topology_.local_ranks[static_cast<size_t>(l)]);
  }
  char text[32];
  std::snprintf(text, sizeof text, "%g", seconds);
  return Name(rank()) + " waited " + text + " s for " + whom + " in " + doing() +
         "; it is stopped or far behind";
}

Result Communicator::TimedOut(int peer) const {
  return Result::Fail(Code::kTimeout,
                      Waited(peer, timeout_) + " (SPARKVOD_COLLECTIVE_TIMEOUT sets the limit)");
}

}  // namespace sparkvod
