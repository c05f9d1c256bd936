#include "native/transport/tls/session.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "native/transport/socket.h"
#include "native/transport/tls/openssl.h"

namespace sparkvod {
namespace {

using openssl::Api;

constexpr size_t kRecordBytes = 16 << 10;  // the most that a record carries
// Encrypted before the kernel is asked to send: a system call for several records, which stay in
// the cache meanwhile.
constexpr size_t kBurstBytes = 4 * kRecordBytes;
// Read from the kernel at a time.
constexpr size_t kReadBytes = 4 * (kRecordBytes + 256);
// The one cipher suite, by name and by number. A pre-shared key goes with its hash.
constexpr const char* kCipherName = "TLS_AES_128_GCM_SHA256";
constexpr unsigned char kCipher[] = {0x13, 0x01};
// Whose key it is the hello has said already, so all are called the same.
constexpr unsigned char kIdentity[] = "sparkvod";
constexpr size_t kIdentityBytes = sizeof kIdentity - 1;
constexpr int kOwner = 0;  // index of the session in the library's object

// The library, once it has been loaded; never unloaded, as others of the process may use it too.
struct Library {
  std::mutex mu;
  bool ready = false;
  Api api{};
  openssl::Context* context = nullptr;
  openssl::BioMethod* socket = nullptr;  // by which it reads and writes a session's socket
};

Library& TheLibrary() {
  static Library library;
  return library;
}

const Api& Tls() { return TheLibrary().api; }

std::string LastReason() {
  const char* const reason = Tls().ERR_reason_error_string(Tls().ERR_peek_last_error());
  return reason != nullptr ? reason : "no reason was given";
}

// The key as the library takes it: a session that both ends had before.
openssl::SslSession* SessionOf(openssl::Ssl* ssl, const std::string& key) {
  openssl::SslSession* const session = Tls().SSL_SESSION_new();
  const openssl::Cipher* const cipher = Tls().SSL_CIPHER_find(ssl, kCipher);
  const auto* const bytes = reinterpret_cast<const unsigned char*>(key.data());
  if (session != nullptr && cipher != nullptr &&
      Tls().SSL_SESSION_set1_master_key(session, bytes, key.size()) == 1 &&
      Tls().SSL_SESSION_set_cipher(session, cipher) == 1 &&
      Tls().SSL_SESSION_set_protocol_version(session, openssl::kTls13) == 1)
    return session;
  Tls().SSL_SESSION_free(session);
  return nullptr;
}

}  // namespace

// What the library calls.
struct TlsSession::Callbacks {
  static TlsSession& Of(openssl::Ssl* ssl) {
    return *static_cast<TlsSession*>(Tls().SSL_get_ex_data(ssl, kOwner));
  }
  static TlsSession& Of(openssl::Bio* bio) {
    return *static_cast<TlsSession*>(Tls().BIO_get_data(bio));
  }

  static int Use(openssl::Ssl* ssl, const openssl::Digest*, const unsigned char** id,
                 size_t* id_bytes, openssl::SslSession** session) {
    *id = kIdentity;
    *id_bytes = kIdentityBytes;
    *session = SessionOf(ssl, Of(ssl).key_);
    return *session != nullptr ? 1 : 0;
  }

  static int Find(openssl::Ssl* ssl, const unsigned char* id, size_t id_bytes,
                  openssl::SslSession** session) {
    *session = nullptr;
    if (id_bytes != kIdentityBytes || std::memcmp(id, kIdentity, id_bytes) != 0) return 1;
    *session = SessionOf(ssl, Of(ssl).key_);
    return *session != nullptr ? 1 : 0;
  }

  // Takes all, so the library never holds a record back that it wants to be given again in the same
  // words.
  static int Write(openssl::Bio* bio, const char* data, int bytes) {
    Of(bio).records_.append(data, static_cast<size_t>(bytes));
    return bytes;
  }

  static int Read(openssl::Bio* bio, char* data, int bytes) {
    TlsSession& session = Of(bio);
    Tls().BIO_clear_flags(bio, openssl::kBioRetryFlags);
    const ssize_t n = ::recv(session.socket_, data, static_cast<size_t>(bytes), MSG_DONTWAIT);
    if (n > 0) return static_cast<int>(n);
    if (n == 0) {
      session.closed_ = true;
      return 0;
    }
    if (WouldBlock(errno))
      Tls().BIO_set_flags(bio, openssl::kBioRead | openssl::kBioRetry);
    else
      session.error_ = errno;
    return -1;
  }

  static long Control(openssl::Bio*, int command, long, void*) {
    return command == openssl::kBioFlush ? 1 : 0;
  }

  static Result MakeContext(Library* library) {
    const Api& api = library->api;
    api.OPENSSL_init_ssl(openssl::kInitNoAtExit, nullptr);
    openssl::Context* const context = api.SSL_CTX_new(api.TLS_method());
    openssl::BioMethod* const socket =
        api.BIO_meth_new(api.BIO_get_new_index() | openssl::kBioSourceSink, "sparkvod");
    const bool made =
        context != nullptr && socket != nullptr &&
        api.SSL_CTX_ctrl(context, openssl::kSetLowestVersion, openssl::kTls13, nullptr) == 1 &&
        api.SSL_CTX_set_ciphersuites(context, kCipherName) == 1 &&
        api.SSL_CTX_set_num_tickets(context, 0) == 1 &&
        api.BIO_meth_set_write(socket, Write) == 1 && api.BIO_meth_set_read(socket, Read) == 1 &&
        api.BIO_meth_set_ctrl(socket, Control) == 1;
    if (!made) {
      const std::string why = LastReason();
      api.SSL_CTX_free(context);
      api.BIO_meth_free(socket);
      return Result::Fail(Code::kSystem, std::string("OpenSSL cannot be set up for TLS 1.3 with ") +
                                             kCipherName + ": " + why);
    }
    api.SSL_CTX_ctrl(context, openssl::kSetMode, openssl::kModeAutoRetry, nullptr);
    api.SSL_CTX_ctrl(context, openssl::kSetSessionCacheMode, openssl::kSessionCacheOff, nullptr);
    api.SSL_CTX_set_default_read_buffer_len(context, kReadBytes);
    api.SSL_CTX_set_psk_use_session_callback(context, Use);
    api.SSL_CTX_set_psk_find_session_callback(context, Find);
    library->context = context;
    library->socket = socket;
    return {};
  }
};

Result TlsSession::Prepare() {
  Library& library = TheLibrary();
  const std::lock_guard<std::mutex> lock(library.mu);
  if (library.ready) return {};
  SPARKVOD_TRY(openssl::Load(openssl::kLibrary, &library.api));
  SPARKVOD_TRY(Callbacks::MakeContext(&library));
  library.ready = true;
  return {};
}

std::string TlsSession::Version() { return Tls().OpenSSL_version(0); }

Result TlsSession::Create(int socket, bool server, const std::string& key,
                          std::unique_ptr<TlsSession>* out, uint64_t records_per_key) {
  SPARKVOD_TRY(Prepare());
  std::unique_ptr<TlsSession> session(new TlsSession(socket, server, key, records_per_key));
  session->ssl_ = Tls().SSL_new(TheLibrary().context);
  openssl::Bio* const bio = session->ssl_ != nullptr ? Tls().BIO_new(TheLibrary().socket) : nullptr;
  if (bio == nullptr)
    return Result::Fail(Code::kSystem, "OpenSSL cannot make a session: " + LastReason());
  Tls().BIO_set_data(bio, session.get());
  Tls().SSL_set_bio(session->ssl_, bio, bio);
  Tls().SSL_set_ex_data(session->ssl_, kOwner, session.get());
  if (server) {
    Tls().SSL_set_accept_state(session->ssl_);
  } else {
    Tls().SSL_set_connect_state(session->ssl_);
    // There are no certificates: a server that offers one in place of the key is refused.
    Tls().SSL_set_verify(session->ssl_, openssl::kVerifyPeer, nullptr);
  }
  *out = std::move(session);
  return {};
}

TlsSession::~TlsSession() {
  if (ssl_ != nullptr) Tls().SSL_free(ssl_);
}

Result TlsSession::Judge(int result) {
  const int error = Tls().SSL_get_error(ssl_, result);
  if (error == openssl::kErrorWantRead) return {};
  closed_ = closed_ || error == openssl::kErrorZeroReturn;
  if (closed_) return Result::Fail(Code::kPeerLost, "it closed its connection");
  if (error_ != 0) return Result::Errno("its connection failed", error_, Code::kPeerLost);
  return Result::Fail(Code::kPeerLost, "its encrypted connection failed: " + LastReason());
}

Result TlsSession::Handshake(bool* done) {
  *done = false;
  Tls().ERR_clear_error();
  const int result = Tls().SSL_do_handshake(ssl_);
  const Result judged = result == 1 ? Result::Ok() : Judge(result);
  const Result flushed = Flush();  // also the alert that tells the other end what is wrong
  SPARKVOD_TRY(judged);
  SPARKVOD_TRY(flushed);
  if (result != 1 || unsent()) return {};
  if (Tls().SSL_session_reused(ssl_) != 1)
    return Result::Fail(Code::kPeerLost, "the other end did not use this connection's key");
  // The client's last word ends the handshake, but only the server knows that it came in time. It
  // says so; else a client would take a connection for made that the server has given up.
  if (server_ && !said_done_) {
    said_done_ = true;
    SPARKVOD_TRY(Encrypt("", 1));
    SPARKVOD_TRY(Flush());
    if (unsent()) return {};
  }
  if (!server_) {
    char word;
    size_t n = 0;
    SPARKVOD_TRY(Read(&word, 1, &n));
    if (n == 0) return {};
  }
  // From here on; before, nothing may be read beyond the handshake, as nobody would look there.
  Tls().SSL_set_read_ahead(ssl_, 1);
  key_.clear();
  *done = true;
  return {};
}

Result TlsSession::Flush() {
  while (records_at_ < records_.size()) {
    const ssize_t n = ::send(socket_, records_.data() + records_at_, records_.size() - records_at_,
                             MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0)
      return WouldBlock(errno) ? Result::Ok()
                               : Result::Errno("its connection failed", errno, Code::kPeerLost);
    records_at_ += static_cast<size_t>(n);
  }
  records_.clear();
  records_at_ = 0;
  return {};
}

Result TlsSession::NotEncrypted(int result) {
  const Result judged = Judge(result);
  // It wants to be told more before it takes these bytes, as in the middle of a message of the
  // other end's that came in pieces, which no rank sends. They must not count as taken.
  return judged.ok() ? Result::Fail(Code::kPeerLost,
                                    "its encrypted connection failed: a message "
                                    "came in pieces")
                     : judged;
}

Result TlsSession::Encrypt(const void* data, size_t bytes) {
  Tls().ERR_clear_error();
  if (records_made_ >= records_per_key_) {
    if (Tls().SSL_key_update(ssl_, openssl::kUpdateNotRequested) != 1) return NotEncrypted(0);
    records_made_ = 0;
  }
  size_t written = 0;
  const int result = Tls().SSL_write_ex(ssl_, data, bytes, &written);
  if (result != 1) return NotEncrypted(result);
  records_made_ += (bytes + kRecordBytes - 1) / kRecordBytes;
  return {};
}

Result TlsSession::Send(const void* data, size_t bytes, size_t* sent) {
  *sent = 0;
  for (;;) {
    SPARKVOD_TRY(Flush());
    if (unsent()) return {};
    const size_t told = std::min(owed_, bytes - *sent);
    *sent += told;
    owed_ -= told;
    if (*sent == bytes) return {};
    const size_t burst = std::min(bytes - *sent, kBurstBytes);
    SPARKVOD_TRY(Encrypt(static_cast<const char*>(data) + *sent, burst));
    owed_ = burst;
  }
}

Result TlsSession::Read(void* data, size_t bytes, size_t* read) {
  *read = 0;
  SPARKVOD_TRY(unreadable_);
  Tls().ERR_clear_error();
  const int result = Tls().SSL_read_ex(ssl_, data, bytes, read);
  if (result != 1) {
    *read = 0;
    unreadable_ = Judge(result);
  }
  return unreadable_;
}

Result TlsSession::Recv(void* data, size_t bytes, size_t* received) {
  char* const to = static_cast<char*>(data);
  *received = std::min(bytes, ahead_.size());
  if (*received > 0) {
    std::memcpy(to, ahead_.data(), *received);
    ahead_.erase(0, *received);
  }
  while (*received < bytes) {
    size_t n = 0;
    const Result result = Read(to + *received, bytes - *received, &n);
    // What has come is taken first; who asks again is told of the end.
    if (!result.ok() && *received == 0) return result;
    if (n == 0) return {};
    *received += n;
  }
  return {};
}

// A record ends where it likes, and the library looks into one at a time; so what is looked at is
// read, and kept.
Result TlsSession::Peek(void* data, size_t bytes, size_t* available) {
  Result result;
  while (ahead_.size() < bytes) {
    const size_t held = ahead_.size();
    size_t n = 0;
    ahead_.resize(bytes);
    result = Read(ahead_.data() + held, bytes - held, &n);
    ahead_.resize(held + n);
    if (n == 0) break;
  }
  *available = std::min(bytes, ahead_.size());
  if (*available > 0) std::memcpy(data, ahead_.data(), *available);
  return *available > 0 ? Result::Ok() : result;
}

void TlsSession::Close() {
  Tls().ERR_clear_error();
  Tls().SSL_shutdown(ssl_);
  (void)!Flush().ok();
}

}  // namespace sparkvod
