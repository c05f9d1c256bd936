// One end of an encrypted connection: TLS 1.3 over a non-blocking socket, between two ends that
// know one key (an external PSK with a fresh Diffie-Hellman exchange, so that who learns the key
// later cannot read what he recorded).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "native/base/result.h"

namespace sparkvod {
namespace openssl {
struct Ssl;
}

class TlsSession {
 public:
  // A key of AES-GCM may encrypt 2^24.5 records (RFC 8446, 5.5); after these there is a new one.
  static constexpr uint64_t kRecordsPerKey = uint64_t{1} << 23;

  // Loads the library when nobody has; says what is missing. Once it has succeeded, sessions can be
  // made.
  static Result Prepare();
  // "OpenSSL 3.0.11 19 Sep 2023"
  static std::string Version();

  // Over a connected socket, which the caller keeps open for as long. `key`: 32 bytes that both
  // ends have, and nobody else; one of its own for each connection.
  static Result Create(int socket, bool server, const std::string& key,
                       std::unique_ptr<TlsSession>* out, uint64_t records_per_key = kRecordsPerKey);
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  // None of these blocks. Each goes as far as it can; when nothing moved it may be tried again when
  // the socket has news.

  // Until `done` the socket is awaited to be writable when unsent(), else readable.
  Result Handshake(bool* done);
  // What is told as sent is in the kernel's hands. The bytes that were not are given again, by one
  // call or by several.
  Result Send(const void* data, size_t bytes, size_t* sent);
  Result Recv(void* data, size_t bytes, size_t* received);
  Result Peek(void* data, size_t bytes, size_t* available);
  // Tells the other end that nothing follows.
  void Close();

  bool unsent() const { return !records_.empty(); }
  // Whether the other end's bytes have come to an end.
  bool closed() const { return closed_; }

 private:
  TlsSession(int socket, bool server, std::string key, uint64_t records_per_key)
      : socket_(socket), server_(server), key_(std::move(key)), records_per_key_(records_per_key) {}
  struct Callbacks;
  friend struct Callbacks;

  Result Read(void* data, size_t bytes, size_t* read);
  Result Encrypt(const void* data, size_t bytes);
  // Hands encrypted bytes to the kernel.
  Result Flush();
  // The error of bytes that the library did not take.
  Result NotEncrypted(int result);
  // What it means that a call of the library returned `result`; ok when it wants more bytes.
  Result Judge(int result);

  int socket_;
  bool server_;
  bool said_done_ = false;  // the server, to the client
  std::string key_;
  openssl::Ssl* ssl_ = nullptr;
  uint64_t records_per_key_;
  uint64_t records_made_ = 0;  // with the current key
  std::string records_;        // encrypted, and not sent from records_at_ on
  size_t records_at_ = 0;
  size_t owed_ = 0;    // plain bytes in them that the caller has not been told as sent
  std::string ahead_;  // decrypted, and only looked at so far
  Result unreadable_;  // why no more can be read
  int error_ = 0;      // errno of the socket
  bool closed_ = false;
};

}  // namespace sparkvod
