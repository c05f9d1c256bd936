#include "tests/native/relay.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

#include "native/base/clock.h"
#include "native/bootstrap/endpoint.h"
#include "native/transport/socket.h"
#include "tests/native/check.h"

namespace sparkvod::check {

void Relay::Way::Mutate(Mutation kind, size_t skip, size_t length) {
  skip_ = skip;
  length_ = length;
  mutation_ = kind;  // last: the relay's thread looks at it first
}

void Relay::Way::Apply(std::string* piece, bool* ended) {
  const Mutation kind = mutation_.load();
  if (kind == Mutation::kNone) return;
  const size_t at = skip_.load();
  if (at >= piece->size()) {
    skip_ = at - piece->size();
    return;
  }
  mutation_ = Mutation::kNone;
  const size_t length = std::min(length_.load(), piece->size() - at);
  switch (kind) {
    case Mutation::kNone:
      break;
    case Mutation::kFlip:
      (*piece)[at] = static_cast<char>((*piece)[at] ^ 1);
      break;
    case Mutation::kInsert:
      piece->insert(at, length_.load(), 'G');
      break;
    case Mutation::kDrop:
      piece->erase(at, length);
      break;
    case Mutation::kRepeat:
      piece->insert(at, piece->substr(at, length));
      break;
    case Mutation::kGarble:
      for (size_t i = 0; i < length; ++i)
        (*piece)[at + i] = static_cast<char>((*piece)[at + i] * 31 + static_cast<char>(i) + 7);
      break;
    case Mutation::kCut:
      piece->resize(at);
      *ended = true;
      break;
  }
}

Relay::Relay(const std::string& endpoint) {
  Endpoint rank;
  EXPECT(Endpoint::Decode(endpoint, 0, &rank).ok());
  port_ = rank.port;
  EXPECT_EQ(ListenTcp("127.0.0.1", "", &listener_, &rank.port).Report(), "ok");
  rank.addresses = {"127.0.0.1"};
  endpoint_ = rank.Encode();
  thread_ = std::thread([this] { Run(); });
}

Relay::~Relay() {
  over_.store(true);
  thread_.join();
}

void Relay::AcceptOne() {
  Fd near, far;
  if (!Accept(listener_.get(), &near).ok() || !near.valid()) return;
  EXPECT_EQ(StartConnectTcp("127.0.0.1", port_, &far).Report(), "ok");
  pipes_.push_back(std::make_unique<Pipe>(Pipe{near.get(), far.get(), &inward}));
  pipes_.push_back(std::make_unique<Pipe>(Pipe{far.get(), near.get(), &outward}));
  sockets_.push_back(std::move(near));
  sockets_.push_back(std::move(far));
}

bool Relay::Pass(Pipe* pipe) {
  if (pipe->held.empty()) {
    if (pipe->ended || pipe->way->stopped.load() || NowNs() < pipe->next_ns) return false;
    std::string piece(pipe->way->piece.load(), '\0');
    const ssize_t n = ::recv(pipe->from, piece.data(), piece.size(), MSG_DONTWAIT);
    if (n < 0) return false;
    if (n == 0) {
      pipe->ended = true;
      ::shutdown(pipe->to, SHUT_WR);
      return true;
    }
    piece.resize(static_cast<size_t>(n));
    pipe->way->Apply(&piece, &pipe->ended);
    pipe->held = std::move(piece);
    pipe->next_ns = NowNs() + int64_t{1000} * pipe->way->pause_us.load();
  }
  const ssize_t n =
      ::send(pipe->to, pipe->held.data(), pipe->held.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (n <= 0) return false;
  pipe->held.erase(0, static_cast<size_t>(n));
  pipe->way->passed += static_cast<size_t>(n);
  if (pipe->held.empty() && pipe->ended) ::shutdown(pipe->to, SHUT_WR);
  return true;
}

void Relay::Run() {
  while (!over_.load()) {
    AcceptOne();
    bool moved = false;
    for (const auto& pipe : pipes_) moved = Pass(pipe.get()) || moved;
    if (!moved) ::usleep(200);
  }
}

}  // namespace sparkvod::check
