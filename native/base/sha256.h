// SHA-256 (FIPS 180-4) and HMAC-SHA-256 (RFC 2104), by which connections prove the job's secret.
//
// Our own because a wheel that must install everywhere should not link a cryptographic library for
// 64 bytes per connection. Nothing here is secret-dependent in its control flow; speed does not
// matter.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace sparkvod {

using Digest = std::array<uint8_t, 32>;

// The hash of bytes given in any number of pieces.
class Sha256 {
 public:
  Sha256();
  void Update(const void* data, size_t nbytes);
  // Ends the message; the object must not be updated afterwards.
  Digest Final();

 private:
  void Block(const uint8_t* block);

  std::array<uint32_t, 8> state_;
  std::array<uint8_t, 64> pending_;
  uint64_t total_ = 0;  // bytes so far; total_ % 64 of them wait in pending_
};

Digest HmacSha256(const void* key, size_t key_bytes, const void* message, size_t message_bytes);

// Compares in a time that does not depend on where the bytes differ.
bool EqualInConstantTime(const void* a, const void* b, size_t nbytes);

}  // namespace sparkvod
