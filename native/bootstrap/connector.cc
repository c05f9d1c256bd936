#include "native/bootstrap/connector.h"

#include <poll.h>

#include <algorithm>

#include "native/transport/socket.h"

namespace sparkvod {
namespace {

constexpr double kAttemptSeconds = 5;    // for one address, and for one handshake
constexpr int64_t kRetryNs = 100000000;  // between rounds over a peer's addresses
constexpr size_t kMaxStrangers = 1024;   // handshakes under way at once

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
  const bool same_host = peer.host_id == endpoints_[static_cast<size_t>(rank_)].host_id;
  std::vector<std::string> addresses;
  for (const std::string& a : peer.addresses)
    if (IsLoopback(a) == same_host) addresses.push_back(a);
  if (addresses.empty()) addresses = peer.addresses;
  if (addresses.empty()) return Result::Fail(Code::kInvalid, "it told no address");
  const std::string& address = addresses[attempt->next_address++ % addresses.size()];
  return StartConnectTcp(address, peer.port, fd);
}

void Connector::Retry(const Key& key, const std::string& why) {
  Attempt& attempt = wanted_[key];
  attempt.running = false;
  attempt.not_before_ns = NowNs() + kRetryNs;
  attempt.last_error = why;
}

void Connector::StartAttempts() {
  for (auto& [key, attempt] : wanted_) {
    if (key.first > rank_ || attempt.running || made_.count(key) != 0 ||
        NowNs() < attempt.not_before_ns)
      continue;
    Fd fd;
    const Result started = StartOne(key, &attempt, &fd);
    if (!started.ok()) {
      Retry(key, started.Report());
      continue;
    }
    attempt.running = true;
    connecting_.push_back({key, std::move(fd), Deadline::After(kAttemptSeconds)});
  }
}

void Connector::AcceptAll(int listener) {
  for (Fd fd = Accept(listener); fd.valid(); fd = Accept(listener)) {
    if (shaking_.size() >= kMaxStrangers) continue;  // drops it; a peer of ours tries again
    shaking_.push_back({Handshake::Server(std::move(fd), secret_, encrypts()),
                        {-1, Purpose::kShared},
                        Deadline::After(kAttemptSeconds)});
  }
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
      made_[shaking->key] = handshake.TakeStream();
    else
      Retry(shaking->key, result.Report());
    return true;
  }
  const Hello& hello = handshake.hello();  // of nobody until the secret is proved
  Attempt* const wanted = Wanted(hello);
  if (result.ok() && wanted != nullptr) {
    made_[{hello.from, hello.purpose}] = handshake.TakeStream();
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
    text += "rank " + std::to_string(last) + " on " + endpoints_[static_cast<size_t>(last)].host +
            ": " + attempt.last_error;
  }
  return text;
}

Result Connector::Run(const std::vector<int>& listeners, const Deadline& deadline,
                      const std::function<bool()>& interrupted) {
  while (made_.size() < wanted_.size()) {
    if (deadline.Passed()) return NotConnected(rank_, Missing());
    if (interrupted && interrupted())
      return Result::Fail(Code::kShutDown, "interrupted while connecting");
    StartAttempts();
    std::vector<pollfd> fds;
    for (const int l : listeners) fds.push_back({l, POLLIN, 0});
    for (const Connecting& c : connecting_) fds.push_back({c.fd.get(), POLLOUT, 0});
    for (const Shaking& s : shaking_)
      fds.push_back(
          {s.handshake.fd(),
           static_cast<short>(s.handshake.state() == Handshake::State::kReading ? POLLIN : POLLOUT),
           0});
    ::poll(fds.data(), fds.size(), deadline.LeftMs(50));

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
        Retry(c.key, result.Report());
        continue;
      }
      const Hello hello{rank_, c.key.first, c.key.second};
      shaking_.push_back({Handshake::Client(std::move(c.fd), secret_, hello, encrypts()), c.key,
                          Deadline::After(kAttemptSeconds)});
    }
    connecting_ = std::move(still_connecting);
    std::vector<Shaking> still_shaking;
    for (size_t i = 0; i < shaking_.size(); ++i) {
      const bool ready =
          i >= shaking_before || fds[at + i].revents != 0 || shaking_[i].deadline.Passed();
      if (!ready || !Advance(&shaking_[i])) still_shaking.push_back(std::move(shaking_[i]));
    }
    shaking_ = std::move(still_shaking);
    for (size_t i = 0; i < listeners.size(); ++i)
      if (fds[i].revents != 0) AcceptAll(listeners[i]);
  }
  return {};
}

}  // namespace sparkvod
