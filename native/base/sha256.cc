#include "native/base/sha256.h"

#include <cstring>

namespace sparkvod {
namespace {

// FIPS 180-4, 4.2.2: the first 32 bits of the fractional parts of the cube roots of the first 64
// primes.
constexpr std::array<uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// FIPS 180-4, 5.3.3: the same of the square roots of the first 8 primes.
constexpr std::array<uint32_t, 8> kInitial = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                              0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

constexpr uint32_t Rotate(uint32_t x, int by) { return (x >> by) | (x << (32 - by)); }

uint32_t LoadBigEndian(const uint8_t* p) {
  return uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 | uint32_t{p[3]};
}

}  // namespace

Sha256::Sha256() : state_(kInitial), pending_{} {}

void Sha256::Block(const uint8_t* block) {
  uint32_t w[64];
  for (int t = 0; t < 16; ++t) w[t] = LoadBigEndian(block + 4 * t);
  for (int t = 16; t < 64; ++t) {
    const uint32_t s0 = Rotate(w[t - 15], 7) ^ Rotate(w[t - 15], 18) ^ (w[t - 15] >> 3);
    const uint32_t s1 = Rotate(w[t - 2], 17) ^ Rotate(w[t - 2], 19) ^ (w[t - 2] >> 10);
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (int t = 0; t < 64; ++t) {
    const uint32_t s1 = Rotate(e, 6) ^ Rotate(e, 11) ^ Rotate(e, 25);
    const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[t] + w[t];
    const uint32_t s0 = Rotate(a, 2) ^ Rotate(a, 13) ^ Rotate(a, 22);
    const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const uint32_t add[8] = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) state_[i] += add[i];
}

void Sha256::Update(const void* data, size_t nbytes) {
  const auto* p = static_cast<const uint8_t*>(data);
  const size_t held = total_ % 64;
  total_ += nbytes;
  if (held + nbytes < 64) {
    if (nbytes > 0) std::memcpy(pending_.data() + held, p, nbytes);
    return;
  }
  if (held > 0) {
    std::memcpy(pending_.data() + held, p, 64 - held);
    Block(pending_.data());
    p += 64 - held;
    nbytes -= 64 - held;
  }
  for (; nbytes >= 64; p += 64, nbytes -= 64) Block(p);
  if (nbytes > 0) std::memcpy(pending_.data(), p, nbytes);
}

Digest Sha256::Final() {
  const uint64_t bits = total_ * 8;
  // A one bit, zeros up to 56 modulo 64, then the length in bits, big-endian.
  const size_t held = total_ % 64;
  const size_t zeros = (held < 56 ? 56 : 120) - held;
  uint8_t tail[72] = {0x80};
  for (int i = 0; i < 8; ++i) tail[zeros + i] = static_cast<uint8_t>(bits >> (56 - 8 * i));
  Update(tail, zeros + 8);
  Digest digest;
  for (int i = 0; i < 32; ++i)
    digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

Digest HmacSha256(const void* key, size_t key_bytes, const void* message, size_t message_bytes) {
  uint8_t block[64] = {};
  if (key_bytes > sizeof(block)) {
    Sha256 hash;
    hash.Update(key, key_bytes);
    const Digest digest = hash.Final();
    std::memcpy(block, digest.data(), digest.size());
  } else if (key_bytes > 0) {
    std::memcpy(block, key, key_bytes);
  }
  uint8_t inner_pad[64], outer_pad[64];
  for (int i = 0; i < 64; ++i) {
    inner_pad[i] = block[i] ^ 0x36;
    outer_pad[i] = block[i] ^ 0x5c;
  }
  Sha256 inner, outer;
  inner.Update(inner_pad, 64);
  inner.Update(message, message_bytes);
  const Digest inner_digest = inner.Final();
  outer.Update(outer_pad, 64);
  outer.Update(inner_digest.data(), inner_digest.size());
  return outer.Final();
}

bool EqualInConstantTime(const void* a, const void* b, size_t nbytes) {
  const auto* x = static_cast<const volatile uint8_t*>(a);
  const auto* y = static_cast<const volatile uint8_t*>(b);
  uint8_t differ = 0;
  for (size_t i = 0; i < nbytes; ++i) differ = static_cast<uint8_t>(differ | (x[i] ^ y[i]));
  return differ == 0;
}

}  // namespace sparkvod
