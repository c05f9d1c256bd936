// OpenSSL 3's libssl as far as encrypted connections need it, declared here and looked up at run
// time: building needs no headers of it, and a machine that has no such library runs unencrypted
// worlds all the same.
//
// The declarations follow OpenSSL's manual pages; what its headers define as macros has its number
// here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "native/base/result.h"

namespace sparkvod::openssl {

struct Method;      // SSL_METHOD
struct Context;     // SSL_CTX
struct Ssl;         // SSL
struct SslSession;  // SSL_SESSION
struct Cipher;      // SSL_CIPHER
struct Digest;      // EVP_MD
struct Bio;         // BIO
struct BioMethod;   // BIO_METHOD

using Verify = int (*)(int, void*);
using UseSession = int (*)(Ssl*, const Digest*, const unsigned char** id, size_t* id_bytes,
                           SslSession**);
using FindSession = int (*)(Ssl*, const unsigned char* id, size_t id_bytes, SslSession**);
using BioWrite = int (*)(Bio*, const char* data, int bytes);
using BioRead = int (*)(Bio*, char* data, int bytes);
using BioControl = long (*)(Bio*, int command, long number, void* pointer);

// SSL_CTX_ctrl
constexpr int kSetMode = 33, kSetSessionCacheMode = 44, kSetLowestVersion = 123;
constexpr long kModeAutoRetry = 4, kSessionCacheOff = 0, kTls13 = 0x0304;
// SSL_set_verify
constexpr int kVerifyPeer = 1;
// SSL_get_error
constexpr int kErrorWantRead = 2, kErrorZeroReturn = 6;
// SSL_key_update: this side's keys only
constexpr int kUpdateNotRequested = 0;
// BIO
constexpr int kBioSourceSink = 0x0400, kBioRead = 1, kBioRetry = 8, kBioRetryFlags = 15;
constexpr int kBioFlush = 11;
// OPENSSL_init_ssl: what it has is not torn down at exit, where other threads may still use it
constexpr uint64_t kInitNoAtExit = 0x00080000;

// X(what it returns, name, what it takes), once for the struct and once for the search.
#define SPARKVOD_OPENSSL_FUNCTIONS(X)                                              \
  X(int, OPENSSL_init_ssl, (uint64_t options, const void* settings))               \
  X(const char*, OpenSSL_version, (int what))                                      \
  X(void, ERR_clear_error, ())                                                     \
  X(unsigned long, ERR_peek_last_error, ())                                        \
  X(const char*, ERR_reason_error_string, (unsigned long error))                   \
  X(const Method*, TLS_method, ())                                                 \
  X(Context*, SSL_CTX_new, (const Method*))                                        \
  X(void, SSL_CTX_free, (Context*))                                                \
  X(long, SSL_CTX_ctrl, (Context*, int command, long number, void* pointer))       \
  X(int, SSL_CTX_set_ciphersuites, (Context*, const char* names))                  \
  X(int, SSL_CTX_set_num_tickets, (Context*, size_t))                              \
  X(void, SSL_CTX_set_default_read_buffer_len, (Context*, size_t))                 \
  X(void, SSL_CTX_set_psk_use_session_callback, (Context*, UseSession))            \
  X(void, SSL_CTX_set_psk_find_session_callback, (Context*, FindSession))          \
  X(Ssl*, SSL_new, (Context*))                                                     \
  X(void, SSL_free, (Ssl*))                                                        \
  X(int, SSL_set_ex_data, (Ssl*, int index, void*))                                \
  X(void*, SSL_get_ex_data, (const Ssl*, int index))                               \
  X(void, SSL_set_verify, (Ssl*, int mode, Verify))                                \
  X(void, SSL_set_bio, (Ssl*, Bio * in, Bio * out))                                \
  X(void, SSL_set_accept_state, (Ssl*))                                            \
  X(void, SSL_set_connect_state, (Ssl*))                                           \
  X(void, SSL_set_read_ahead, (Ssl*, int on))                                      \
  X(int, SSL_do_handshake, (Ssl*))                                                 \
  X(int, SSL_session_reused, (const Ssl*))                                         \
  X(int, SSL_read_ex, (Ssl*, void* data, size_t bytes, size_t* read))              \
  X(int, SSL_write_ex, (Ssl*, const void* data, size_t bytes, size_t* written))    \
  X(int, SSL_key_update, (Ssl*, int kind))                                         \
  X(int, SSL_shutdown, (Ssl*))                                                     \
  X(int, SSL_get_error, (const Ssl*, int result))                                  \
  X(const Cipher*, SSL_CIPHER_find, (Ssl*, const unsigned char* id))               \
  X(SslSession*, SSL_SESSION_new, ())                                              \
  X(void, SSL_SESSION_free, (SslSession*))                                         \
  X(int, SSL_SESSION_set1_master_key, (SslSession*, const unsigned char*, size_t)) \
  X(int, SSL_SESSION_set_cipher, (SslSession*, const Cipher*))                     \
  X(int, SSL_SESSION_set_protocol_version, (SslSession*, int))                     \
  X(int, BIO_get_new_index, ())                                                    \
  X(BioMethod*, BIO_meth_new, (int type, const char* name))                        \
  X(void, BIO_meth_free, (BioMethod*))                                             \
  X(int, BIO_meth_set_write, (BioMethod*, BioWrite))                               \
  X(int, BIO_meth_set_read, (BioMethod*, BioRead))                                 \
  X(int, BIO_meth_set_ctrl, (BioMethod*, BioControl))                              \
  X(Bio*, BIO_new, (const BioMethod*))                                             \
  X(void, BIO_set_data, (Bio*, void*))                                             \
  X(void*, BIO_get_data, (Bio*))                                                   \
  X(void, BIO_set_flags, (Bio*, int))                                              \
  X(void, BIO_clear_flags, (Bio*, int))

struct Api {
#define SPARKVOD_OPENSSL_DECLARE(type, name, arguments) type(*name) arguments;
  SPARKVOD_OPENSSL_FUNCTIONS(SPARKVOD_OPENSSL_DECLARE)
#undef SPARKVOD_OPENSSL_DECLARE
};

// What ranks of a version of this engine look for.
constexpr const char* kLibrary = "libssl.so.3";

// Loads the library, which stays loaded, and finds the functions; the error says what to install.
Result Load(const char* library, Api* api);

}  // namespace sparkvod::openssl
