#include "native/bootstrap/handshake.h"

#include <sys/random.h>
#include <sys/socket.h>

#include <cerrno>

#include "native/base/sha256.h"
#include "native/base/wire.h"
#include "native/transport/socket.h"

namespace sparkvod {
namespace {

const std::string kMagic = "SPARKVD2";
constexpr size_t kNonceBytes = 32;
constexpr size_t kMacBytes = 32;
constexpr size_t kHelloBytes = 9;

std::string EncodeHello(const Hello& hello) {
  Writer w;
  w.Put(hello.from);
  w.Put(hello.to);
  w.Put(hello.purpose);
  return w.Take();
}

Hello DecodeHello(const std::string& bytes) {
  Reader r(bytes);
  Hello hello;
  hello.from = r.Get<int32_t>();
  hello.to = r.Get<int32_t>();
  hello.purpose = r.Get<Purpose>();
  return hello;
}

Result WrongKey() {
  return Result::Fail(Code::kPeerLost,
                      "the other end does not belong to this world: it has another secret, or is a "
                      "process of an earlier attempt");
}

std::string Mac(const std::string& key, const std::string& message) {
  const auto mac = HmacSha256(key.data(), key.size(), message.data(), message.size());
  return std::string(reinterpret_cast<const char*>(mac.data()), mac.size());
}

}  // namespace

std::string WorldKey(const std::string& secret, const std::vector<std::string>& endpoints) {
  Writer message;
  message.PutString("world");
  for (const std::string& endpoint : endpoints) message.PutString(endpoint);
  return Mac(secret, message.bytes());
}

std::string RandomBytes(size_t n) {
  std::string bytes(n, '\0');
  size_t at = 0;
  while (at < n) {
    const ssize_t got = ::getrandom(bytes.data() + at, n - at, 0);
    if (got > 0) at += static_cast<size_t>(got);
  }
  return bytes;
}

Handshake::Handshake(Fd socket, const std::string& key, bool server, bool encrypt)
    : socket_(std::move(socket)),
      key_(key),
      server_(server),
      encrypt_(encrypt),
      own_nonce_(RandomBytes(kNonceBytes)) {}

Handshake Handshake::Server(Fd socket, const std::string& key, bool encrypt) {
  Handshake h(std::move(socket), key, true, encrypt);
  h.BeginWrite(kMagic + h.own_nonce_);
  return h;
}

Handshake Handshake::Client(Fd socket, const std::string& key, const Hello& hello, bool encrypt) {
  Handshake h(std::move(socket), key, false, encrypt);
  h.hello_ = hello;
  h.hello_bytes_ = EncodeHello(hello);
  h.BeginRead(kMagic.size() + kNonceBytes);
  return h;
}

void Handshake::BeginRead(size_t bytes) {
  state_ = State::kReading;
  buffer_.assign(bytes, '\0');
  at_ = 0;
}

void Handshake::BeginWrite(std::string bytes) {
  state_ = State::kWriting;
  buffer_ = std::move(bytes);
  at_ = 0;
}

std::string Handshake::Mac(const char* role, const std::string& first, const std::string& second,
                           const std::string& hello) const {
  return sparkvod::Mac(key_, role + first + second + hello);
}

Result Handshake::Step() {
  while (state_ != State::kDone) {
    if (tls_ != nullptr) return StepTls();
    while (at_ < buffer_.size()) {
      const ssize_t n =
          state_ == State::kReading
              ? ::recv(socket_.get(), buffer_.data() + at_, buffer_.size() - at_, MSG_DONTWAIT)
              : ::send(socket_.get(), buffer_.data() + at_, buffer_.size() - at_,
                       MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n > 0) {
        at_ += static_cast<size_t>(n);
      } else if (n == 0) {
        return Result::Fail(Code::kPeerLost, "the connection was closed during the handshake");
      } else if (WouldBlock(errno)) {
        return {};
      } else {
        return Result::Errno("the connection failed during the handshake", errno, Code::kPeerLost);
      }
    }
    if (state_ == State::kReading) {
      SPARKVOD_TRY(OnRead());
    } else if (server_ && step_ == 0) {
      BeginRead(kNonceBytes + kHelloBytes + kMacBytes);
    } else if (server_) {
      SPARKVOD_TRY(OnProved());
    } else {
      BeginRead(kMacBytes);
    }
    ++step_;
  }
  return {};
}

Result Handshake::OnRead() {
  if (server_) {
    peer_nonce_ = buffer_.substr(0, kNonceBytes);
    hello_bytes_ = buffer_.substr(kNonceBytes, kHelloBytes);
    const std::string want = Mac("client", own_nonce_, peer_nonce_, hello_bytes_);
    if (!EqualInConstantTime(want.data(), buffer_.data() + kNonceBytes + kHelloBytes, kMacBytes))
      return WrongKey();
    hello_ = DecodeHello(hello_bytes_);
    BeginWrite(Mac("server", peer_nonce_, own_nonce_, hello_bytes_));
  } else if (step_ == 0) {
    if (buffer_.compare(0, kMagic.size(), kMagic) != 0)
      return Result::Fail(Code::kPeerLost,
                          "what listens there is no rank of this version of sparkvod");
    peer_nonce_ = buffer_.substr(kMagic.size());
    BeginWrite(own_nonce_ + hello_bytes_ + Mac("client", peer_nonce_, own_nonce_, hello_bytes_));
  } else {
    const std::string want = Mac("server", own_nonce_, peer_nonce_, hello_bytes_);
    if (!EqualInConstantTime(want.data(), buffer_.data(), kMacBytes)) return WrongKey();
    return OnProved();
  }
  return {};
}

Result Handshake::OnProved() {
  if (!encrypt_ || hello_.purpose == Purpose::kShared) {
    state_ = State::kDone;
    return {};
  }
  const std::string key = server_ ? Mac("tls", own_nonce_, peer_nonce_, hello_bytes_)
                                  : Mac("tls", peer_nonce_, own_nonce_, hello_bytes_);
  return TlsSession::Create(socket_.get(), server_, key, &tls_);
}

Result Handshake::StepTls() {
  bool done = false;
  if (Result r = tls_->Handshake(&done); !r.ok())
    return Result::Fail(Code::kPeerLost, "the connection could not be encrypted", r);
  state_ = done ? State::kDone : tls_->unsent() ? State::kWriting : State::kReading;
  return {};
}

}  // namespace sparkvod
