// Vectors of FIPS 180-4 (its examples) and RFC 4231.
#include "native/base/sha256.h"

#include <algorithm>
#include <string>

#include "tests/native/check.h"

namespace sparkvod {
namespace {

std::string Hex(const Digest& digest) {
  static const char kDigits[] = "0123456789abcdef";
  std::string text;
  for (uint8_t byte : digest) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::string HashOf(const std::string& message, size_t piece) {
  Sha256 hash;
  for (size_t i = 0; i < message.size(); i += piece)
    hash.Update(message.data() + i, std::min(piece, message.size() - i));
  return Hex(hash.Final());
}

std::string Mac(const std::string& key, const std::string& message) {
  return Hex(HmacSha256(key.data(), key.size(), message.data(), message.size()));
}

TEST(Sha256OfKnownMessages) {
  EXPECT_EQ(HashOf("", 1), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(HashOf("abc", 3), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(HashOf("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 56),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(HashOf(std::string(1000000, 'a'), 4096),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256DoesNotDependOnThePieces) {
  for (size_t n : {1, 55, 56, 57, 63, 64, 65, 119, 120, 128, 300}) {
    const std::string message(n, 'x');
    for (size_t piece : {1, 7, 63, 64, 65, 129})
      EXPECT_EQ(HashOf(message, piece), HashOf(message, n));
  }
}

TEST(HmacOfRfc4231) {
  EXPECT_EQ(Mac(std::string(20, '\x0b'), "Hi There"),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(Mac("Jefe", "what do ya want for nothing?"),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(Mac(std::string(20, '\xaa'), std::string(50, '\xdd')),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  EXPECT_EQ(Mac(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(
      Mac(std::string(131, '\xaa'),
          "This is a test using a larger than block-size key and a larger than block-size data. "
          "The key needs to be hashed before being used by the HMAC algorithm."),
      "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(ConstantTimeComparisonSeesEveryByte) {
  uint8_t a[32] = {}, b[32] = {};
  EXPECT(EqualInConstantTime(a, b, 32));
  EXPECT(EqualInConstantTime(a, b, 0));
  for (int i = 0; i < 32; ++i) {
    b[i] = 0x80;
    EXPECT(!EqualInConstantTime(a, b, 32));
    b[i] = 0;
  }
}

}  // namespace
}  // namespace sparkvod
