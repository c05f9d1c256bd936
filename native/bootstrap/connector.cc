#include "native/bootstrap/connector.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <iterator>

#include "native/transport/shm/shm.h"
#include "native/transport/socket.h"

namespace sparkvod {
namespace {

constexpr double kAttemptSeconds = 5;    // for one address, and for one handshake
constexpr int64_t kRetryNs = 100000000;  // between rounds over a peer's addresses
constexpr size_t kMaxStrangers = 1024;   // handshakes under way at once
// Between two looks whether the ranks of this host listen. One that does not at so many looks has
// left: what it says of it comes first.
constexpr int64_t kLookNs = 100000000;
constexpr int kLooks = 3;
// While there is no descriptor for them, connections wait so long for their acceptance, and
// strangers are left so much time.
constexpr int64_t kFullNs = 10000000, kStrangerNs = 200000000;
// Connections that are accepted before this rank looks after its own: who floods it cannot keep it
// from that.
constexpr int kAcceptedAtOnce = 256;

bool HasCome(int socket) {
  char byte;
  return ::recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 1;
}

bool IsLoopback(const std::string& address) {
  return address.rfind("127.", 0) == 0 || address == "::1";
}

}  // namespace

Result NotConnected(int rank, const std::string& missing) {
  return Result::Fail(
      Code::kTimeout,
      "rank " + std::to_string(rank) +
          " could not connect to every rank within SPARKVOD_START_TIMEOUT; missing: " + missing);
}

Result Connector::StartOne(const Key& key, Attempt* attempt, Fd* fd) {
  const Endpoint& peer = endpoints_[static_cast<size_t>(key.first)];
  if (key.second == Purpose::kShared) return StartConnectUnix(peer.unix_name, fd);
  // Within a host loopback is the safe way; between hosts it leads back home.
  const bool same_host = peer.host_id == own().host_id;
  std::vector<std::string> addresses;
  for (const std::string& a : peer.addresses)
    if (IsLoopback(a) == same_host) addresses.push_back(a);
  if (addresses.empty()) addresses = peer.addresses;
  if (addresses.empty()) return Result::Fail(Code::kInvalid, "it told no address");
  const std::string& address = addresses[attempt->next_address++ % addresses.size()];
  return StartConnectTcp(address, peer.port, fd);
}

std::string Connector::Name(int rank) const {
  return "rank " + std::to_string(rank) + " on " + endpoints_[static_cast<size_t>(rank)].host;
}

void Connector::Retry(const Key& key, const Result& why) {
  if (wanted_.count(key) == 0) return;
  Attempt& attempt = wanted_[key];
  attempt.running = false;
  attempt.not_before_ns = NowNs() + kRetryNs;
  attempt.last_error = why.Report();
}

Result Connector::StartAttempts() {
  for (auto& [key, attempt] : wanted_) {
    if (key.first > rank_ || attempt.running || made_.count(key) != 0 ||
        NowNs() < attempt.not_before_ns)
      continue;
    Fd fd;
    const Result started = StartOne(key, &attempt, &fd);
    if (started.out_of_descriptors() && !MayGetRoom()) return started;
    if (!started.ok()) {
      Retry(key, started);
      continue;
    }
    attempt.running = true;
    connecting_.push_back({key, std::move(fd), Deadline::After(kAttemptSeconds)});
  }
  return {};
}

bool Connector::MayGetRoom() {
  const auto oldest = std::find_if(shaking_.begin(), shaking_.end(),
                                   [](const Shaking& shaking) { return shaking.key.first < 0; });
  full_until_ns_ = NowNs() + kFullNs;
  if (oldest == shaking_.end() && leaving_) {
    // Of ranks that are to be told, those connections over which they cannot be.
    const auto useless = [this](const auto& one) {
      return one.key.second != Purpose::kLink && one.key.second != Purpose::kShared &&
             links_.count(one.key.first) == 0;
    };
    connecting_.erase(std::remove_if(connecting_.begin(), connecting_.end(), useless),
                      connecting_.end());
    shaking_.erase(std::remove_if(shaking_.begin(), shaking_.end(), useless), shaking_.end());
    for (auto m = made_.begin(); m != made_.end();) {
      const bool tells = m->first.second == Purpose::kShared || links_.count(m->first.first) != 0;
      m = tells ? std::next(m) : made_.erase(m);
    }
    return true;
  }
  if (oldest == shaking_.end()) return false;
  // A peer of ours has proved itself by then, or tries again.
  if (NowNs() - oldest->began_ns > kStrangerNs) shaking_.erase(oldest);
  return true;
}

Result Connector::AcceptAll(int listener) {
  for (int n = 0; n < kAcceptedAtOnce; ++n) {
    Fd fd;
    const Result accepted = Accept(listener, &fd);
    if (!accepted.ok()) return MayGetRoom() ? Result::Ok() : accepted;
    if (!fd.valid()) return {};
    if (IsAnotherUsers(fd.get())) continue;          // before it counts
    if (shaking_.size() >= kMaxStrangers) continue;  // drops it; a peer of ours tries again
    shaking_.push_back({Handshake::Server(std::move(fd), key_, encrypts()),
                        {-1, Purpose::kShared},
                        Deadline::After(kAttemptSeconds),
                        NowNs()});
  }
  return {};
}

void Connector::Keep(const Key& key, Stream stream) {
  Stream& made = made_[key];
  if (key.second == Purpose::kLink)
    links_[key.first] = std::make_unique<TcpLink>(std::move(stream));
  else
    made = std::move(stream);
}

bool Connector::Advance(Shaking* shaking) {
  Handshake& handshake = shaking->handshake;
  const bool incoming = shaking->key.first < 0;
  Result result = handshake.Step();
  if (result.ok() && handshake.state() != Handshake::State::kDone) {
    if (!shaking->deadline.Passed()) return false;
    result = Result::Fail(Code::kTimeout, "the handshake took too long");
  }
  if (!incoming) {
    if (result.ok())
      Keep(shaking->key, handshake.TakeStream());
    else
      Retry(shaking->key, result);
    return true;
  }
  const Hello& hello = handshake.hello();  // of nobody until the secret is proved
  Attempt* const wanted = Wanted(hello);
  if (result.ok() && wanted != nullptr) {
    Keep({hello.from, hello.purpose}, handshake.TakeStream());
    return true;
  }
  if (leaving_) {
    // Kept until its rank is told, which else would find it closed without a reason.
    const bool untold = wanted_.count({hello.from, Purpose::kLink}) != 0;
    if (result.ok() && untold) Keep({hello.from, hello.purpose}, handshake.TakeStream());
    return true;
  }
  if (wanted != nullptr) wanted->last_error = result.Report();
  const std::string whose = hello.from < 0 ? "a stranger's connection"
                                           : "a connection of rank " + std::to_string(hello.from);
  log_.Warning("dropped " + whose +
               (result.ok() ? " that was meant for rank " + std::to_string(hello.to)
                            : ": " + result.Report()));
  return true;
}

Connector::Attempt* Connector::Wanted(const Hello& hello) {
  const auto attempt = wanted_.find({hello.from, hello.purpose});
  const bool wanted = hello.to == rank_ && hello.from > rank_ && attempt != wanted_.end();
  return wanted ? &attempt->second : nullptr;
}

std::string Connector::Missing() const {
  std::string text;
  int last = -1;
  for (const auto& [key, attempt] : wanted_) {
    if (made_.count(key) != 0 || key.first == last) continue;
    last = key.first;
    if (!text.empty()) text += "; ";
    text += Name(last) + ": " + attempt.last_error;
  }
  return text;
}

Result Connector::HearPeers() {
  Departure how;
  for (const auto& [r, link] : links_)
    if (link->Left(&how)) return LeftWhileConnecting(Name(r), how);
  for (const auto& [key, stream] : made_) {
    if (key.second != Purpose::kShared || offered_.count(key.first) != 0) continue;
    if (shm::Refused(stream.fd(), &how)) return LeftWhileConnecting(Name(key.first), how);
    // An offer stays where it is until all are connected, and must not end each wait meanwhile.
    if (HasCome(stream.fd())) offered_.insert(key.first);
  }
  return {};
}

Result Connector::CheckListeners() {
  const int64_t now_ns = NowNs();
  if (now_ns < look_at_ns_) return {};
  look_at_ns_ = now_ns + kLookNs;
  std::string gone;
  bool certain = false;
  int last = -1;
  for (auto& [key, attempt] : wanted_) {
    const auto& [r, purpose] = key;
    if (r == last || made_.count(key) != 0 || attempt.running) continue;
    last = r;
    const Endpoint& peer = endpoints_[static_cast<size_t>(r)];
    const bool listens = peer.host_id != kernel_id_ || !UnixNameIsFree(peer.unix_name);
    attempt.silent = listens ? 0 : attempt.silent + 1;
    if (listens) continue;
    gone += (gone.empty() ? "" : " and ") + Name(r);
    certain = certain || attempt.silent >= kLooks;
  }
  if (!certain) return {};
  return Result::Fail(Code::kPeerLost, gone +
                                           " left while the ranks connected: it ended, or failed "
                                           "and has said why itself");
}

Result Connector::Turn(const std::vector<int>& listeners, const Deadline& deadline) {
  SPARKVOD_TRY(StartAttempts());
  std::vector<pollfd> fds;
  const bool full = NowNs() < full_until_ns_;
  for (const int l : listeners) fds.push_back({full ? -1 : l, POLLIN, 0});
  for (const Connecting& c : connecting_) fds.push_back({c.fd.get(), POLLOUT, 0});
  for (const Shaking& s : shaking_)
    fds.push_back(
        {s.handshake.fd(),
         static_cast<short>(s.handshake.state() == Handshake::State::kReading ? POLLIN : POLLOUT),
         0});
  const size_t watched = fds.size();
  for (const auto& [r, link] : links_) fds.push_back({link->fd(), POLLIN, 0});
  for (const auto& [key, stream] : made_)
    if (key.second == Purpose::kShared && offered_.count(key.first) == 0)
      fds.push_back({stream.fd(), POLLIN, 0});
  ::poll(fds.data(), fds.size(), deadline.LeftMs(full ? kFullNs / 1000000 : 50));

  // Oldest parts of the poll set first: what is accepted below joins at the end and is polled
  // next time.
  size_t at = listeners.size();
  const size_t shaking_before = shaking_.size();
  std::vector<Connecting> still_connecting;
  for (Connecting& c : connecting_) {
    const bool ended = fds[at++].revents != 0;
    if (!ended && !c.deadline.Passed()) {
      still_connecting.push_back(std::move(c));
      continue;
    }
    const Result result = ended ? FinishConnect(c.fd.get())
                                : Result::Fail(Code::kTimeout, "connecting took too long");
    if (!result.ok()) {
      Retry(c.key, result);
      continue;
    }
    const Hello hello{rank_, c.key.first, c.key.second};
    shaking_.push_back({Handshake::Client(std::move(c.fd), key_, hello, encrypts()), c.key,
                        Deadline::After(kAttemptSeconds), NowNs()});
  }
  connecting_ = std::move(still_connecting);
  const bool news = std::any_of(fds.begin() + static_cast<std::ptrdiff_t>(watched), fds.end(),
                                [](const pollfd& p) { return p.revents != 0; });
  std::vector<Shaking> still_shaking;
  for (size_t i = 0; i < shaking_.size(); ++i) {
    const bool ready =
        i >= shaking_before || fds[at + i].revents != 0 || shaking_[i].deadline.Passed();
    if (!ready || !Advance(&shaking_[i])) still_shaking.push_back(std::move(shaking_[i]));
  }
  shaking_ = std::move(still_shaking);
  for (size_t i = 0; i < listeners.size(); ++i)
    if (fds[i].revents != 0) SPARKVOD_TRY(AcceptAll(listeners[i]));
  if (leaving_) return {};
  if (news) SPARKVOD_TRY(HearPeers());
  return CheckListeners();
}

Result Connector::Run(const std::vector<int>& listeners, const Deadline& deadline,
                      const std::function<bool()>& interrupted) {
  while (made_.size() < wanted_.size()) {
    if (deadline.Passed()) return NotConnected(rank_, Missing());
    if (interrupted && interrupted())
      return Result::Fail(Code::kShutDown, "interrupted while connecting");
    SPARKVOD_TRY(Turn(listeners, deadline));
  }
  return {};
}

void Connector::Leave(const std::vector<int>& listeners, const Departure& how, double seconds) {
  leaving_ = true;
  std::set<int> untold;
  for (const auto& [key, attempt] : wanted_) untold.insert(key.first);
  // One connection is enough to tell a rank.
  const auto tells = [](const Key& key) {
    return key.second == Purpose::kLink || key.second == Purpose::kShared;
  };
  for (auto w = wanted_.begin(); w != wanted_.end();)
    w = tells(w->first) ? std::next(w) : wanted_.erase(w);
  const Deadline deadline = Deadline::After(std::max(seconds, 1e-9));
  for (;;) {
    for (const auto& [key, stream] : made_) {
      if (!tells(key)) continue;
      // What is not here any more was taken by who tells that rank.
      const auto link = links_.find(key.first);
      if (link != links_.end() && link->second != nullptr) link->second->Leave(how);
      if (key.second == Purpose::kShared && stream.fd() >= 0) shm::Refuse(stream.fd(), how);
      untold.erase(key.first);
      wanted_.erase(key);
    }
    // Closed only now, so that nobody finds a connection closed before it has the reason.
    for (auto m = made_.begin(); m != made_.end();)
      m = untold.count(m->first.first) != 0 ? std::next(m) : made_.erase(m);
    for (auto l = links_.begin(); l != links_.end();)
      l = untold.count(l->first) != 0 ? std::next(l) : links_.erase(l);
    if (untold.empty() || deadline.Passed() || !Turn(listeners, deadline).ok()) return;
  }
}

}  // namespace sparkvod
