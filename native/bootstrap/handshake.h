// Proof that both ends of a connection belong to one world, before anything else of it is read.
//
//   server -> client   magic, nonce_s                                              fixed size
//   client -> server   nonce_c, hello, HMAC(key, "client" nonce_s nonce_c hello)   fixed size
//   server -> client   HMAC(key, "server" nonce_c nonce_s hello)                   fixed size
//
// The key is the world's (WorldKey), so a rank of an earlier attempt that knows the same secret
// proves nothing: it was given other endpoints.
//
// The hello (who connects to whom, for what) is looked at only after its HMAC was verified.
// HMAC-SHA256, 32-byte nonces.
//
// A connection that is to be encrypted goes on with TLS 1.3, under a key of its own:
// HMAC(key, "tls" nonce_s nonce_c hello). Strangers do not come so far, so the library that
// reads what comes then need not stand against them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "native/base/result.h"
#include "native/transport/fd.h"
#include "native/transport/tcp/stream.h"

namespace sparkvod {

// What a connection is for.
enum class Purpose : uint8_t { kShared = 0, kData = 1, kLink = 2, kMoreData = 3 };
// The stream of that number of a pair's.
constexpr Purpose DataStream(int number) {
  return number == 0 ? Purpose::kData
                     : static_cast<Purpose>(static_cast<int>(Purpose::kMoreData) + number - 1);
}

struct Hello {
  int32_t from = -1;
  int32_t to = -1;
  Purpose purpose = Purpose::kShared;
};

// One side of one handshake on a non-blocking socket; Step() goes as far as it can without
// blocking.
class Handshake {
 public:
  enum class State { kReading, kWriting, kDone };

  // `encrypt`: connections between hosts go on with TLS, those for shared memory do not.
  static Handshake Server(Fd socket, const std::string& key, bool encrypt = false);
  static Handshake Client(Fd socket, const std::string& key, const Hello& hello,
                          bool encrypt = false);

  Result Step();
  State state() const { return state_; }
  const Hello& hello() const { return hello_; }
  int fd() const { return socket_.get(); }
  Stream TakeStream() { return {std::move(socket_), std::move(tls_)}; }

 private:
  Handshake(Fd socket, const std::string& key, bool server, bool encrypt);
  Result OnRead();
  // Both ends have proved the key.
  Result OnProved();
  Result StepTls();
  void BeginRead(size_t bytes);
  void BeginWrite(std::string bytes);
  std::string Mac(const char* role, const std::string& first, const std::string& second,
                  const std::string& hello) const;

  Fd socket_;
  std::string key_;
  bool server_, encrypt_;
  std::unique_ptr<TlsSession> tls_;  // from OnProved on, of a connection that is to be encrypted
  State state_ = State::kReading;
  int step_ = 0;
  std::string buffer_;
  size_t at_ = 0;
  std::string own_nonce_, peer_nonce_, hello_bytes_;
  Hello hello_;
};

// The key of all proofs of one world: HMAC(secret, the endpoints of all ranks). Each endpoint names
// its rank's listener by random bytes that were drawn for it, so no two worlds have one key.
std::string WorldKey(const std::string& secret, const std::vector<std::string>& endpoints);

// Random bytes from the kernel.
std::string RandomBytes(size_t n);

}  // namespace sparkvod
