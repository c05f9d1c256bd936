// Encrypted connections by themselves: what the contract of transports does not see.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>

#include "native/transport/fd.h"
#include "native/transport/tls/openssl.h"
#include "native/transport/tls/session.h"
#include "tests/native/check.h"
#include "tests/native/ranks.h"

namespace sparkvod {
namespace {

const std::string kKey(32, 'k');
constexpr int kServer = 0, kClient = 1;

// Both ends of a connection, and what lies between them: what one sends is passed on by Carry.
struct Wire {
  explicit Wire(uint64_t records_per_key = TlsSession::kRecordsPerKey,
                const std::string& client_key = kKey) {
    for (int side = 0; side < 2; ++side) {
      int fds[2];
      EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
      own[side] = Fd(fds[0]);
      far[side] = Fd(fds[1]);
      const Result made =
          TlsSession::Create(own[side].get(), side == kServer, side == kServer ? kKey : client_key,
                             &ends[side], records_per_key);
      EXPECT_EQ(made.Report(), "ok");
    }
  }

  // Passes on what `side` has sent, as far as there is room; keeps a copy.
  void Carry(int side) {
    char buffer[70000];
    const ssize_t n = ::recv(far[side].get(), buffer, room, MSG_DONTWAIT);
    if (n <= 0) return;
    if (spoil) buffer[n / 2] = static_cast<char>(buffer[n / 2] ^ 1);
    heard.append(buffer, static_cast<size_t>(n));
    EXPECT_EQ(::send(far[1 - side].get(), buffer, static_cast<size_t>(n), 0), n);
  }

  // How each side's handshake ended.
  void Shake(Result* of_server, Result* of_client) {
    bool done[2] = {false, false};
    Result* const of[2] = {of_server, of_client};
    for (int turn = 0; turn < 20; ++turn)
      for (int side = 0; side < 2; ++side) {
        if (!done[side] && of[side]->ok()) *of[side] = ends[side]->Handshake(&done[side]);
        Carry(side);
      }
    for (int side = 0; side < 2; ++side)
      if (of[side]->ok() && !done[side]) *of[side] = Result::Fail(Code::kTimeout, "not done");
  }
  void Shake() {
    Result of_server, of_client;
    Shake(&of_server, &of_client);
    EXPECT_EQ(of_server.Report(), "ok");
    EXPECT_EQ(of_client.Report(), "ok");
  }

  Fd own[2], far[2];
  std::unique_ptr<TlsSession> ends[2];
  std::string heard;    // all that went over the wire
  size_t room = 70000;  // of what is carried at a time
  bool spoil = false;
};

std::string Noise(size_t bytes, uint32_t seed) {
  std::mt19937 draw(seed);
  std::string noise(bytes, '\0');
  for (char& c : noise) c = static_cast<char>(draw());
  return noise;
}

// Much at once both ways, in pieces of any size: also what was not taken is offered again by other
// pieces. With a new key every three records, as after many bytes.
TEST(TlsCarriesBytesBothWaysAndChangesItsKeys) {
  if (!check::CanEncrypt()) return;
  for (const uint64_t records_per_key : {uint64_t{3}, TlsSession::kRecordsPerKey}) {
    Wire wire(records_per_key);
    wire.Shake();
    std::mt19937 draw(7);
    const std::string out[2] = {Noise(2500001, 1), Noise(2500001, 2)};
    std::string in[2];
    size_t sent[2] = {0, 0};
    for (int turn = 0; turn < 100000 && in[0].size() + in[1].size() < 5000002; ++turn) {
      for (int side = 0; side < 2; ++side) {
        size_t n = 0;
        const size_t piece =
            std::min<size_t>(out[side].size() - sent[side], draw() % (turn % 2 ? 200000 : 300));
        EXPECT_EQ(wire.ends[side]->Send(out[side].data() + sent[side], piece, &n).Report(), "ok");
        EXPECT(n <= piece);
        sent[side] += n;
        wire.room = 1 + draw() % 70000;
        wire.Carry(side);
        std::string taken(draw() % 100000, '\0');
        EXPECT_EQ(wire.ends[1 - side]->Recv(taken.data(), taken.size(), &n).Report(), "ok");
        in[1 - side].append(taken, 0, n);
      }
    }
    EXPECT(in[kServer] == out[kClient]);
    EXPECT(in[kClient] == out[kServer]);
    EXPECT(wire.heard.find(out[0].substr(1000, 16)) == std::string::npos);
  }
}

// What is looked at may lie in several records, and stays.
TEST(TlsPeeksOverTheEndsOfRecords) {
  if (!check::CanEncrypt()) return;
  Wire wire;
  wire.Shake();
  size_t n = 0;
  char seen[8];
  for (const char* word : {"one", "two", "three"}) {
    EXPECT(wire.ends[kClient]->Send(word, std::strlen(word), &n).ok());
    EXPECT_EQ(n, std::strlen(word));
    wire.Carry(kClient);
  }
  for (int look = 0; look < 2; ++look) {
    EXPECT(wire.ends[kServer]->Peek(seen, 8, &n).ok());
    EXPECT_EQ(std::string(seen, n), "onetwoth");
  }
  EXPECT(wire.ends[kServer]->Recv(seen, 4, &n).ok());
  EXPECT_EQ(std::string(seen, n), "onet");
  EXPECT(wire.ends[kServer]->Peek(seen, 8, &n).ok());
  EXPECT_EQ(std::string(seen, n), "wothree");
  EXPECT(wire.ends[kServer]->Recv(seen, 8, &n).ok());
  EXPECT_EQ(std::string(seen, n), "wothree");
  EXPECT(wire.ends[kServer]->Recv(seen, 8, &n).ok());
  EXPECT_EQ(n, size_t{0});
}

TEST(TlsNeedsTheSameKeyAtBothEnds) {
  if (!check::CanEncrypt()) return;
  Wire wire(TlsSession::kRecordsPerKey, std::string(32, 'K'));
  Result of_server, of_client;
  wire.Shake(&of_server, &of_client);
  EXPECT(of_server.code() == Code::kPeerLost);
  EXPECT(of_client.code() == Code::kPeerLost);
  EXPECT_CONTAINS(of_server.Report(), "its encrypted connection failed: ");
}

// As before the handshake, or in the middle of a message of the other end's.
TEST(TlsTakesNoBytesThatItCannotEncrypt) {
  if (!check::CanEncrypt()) return;
  Wire wire;
  size_t n = 1;
  const Result result = wire.ends[kClient]->Send("secret", 6, &n);
  EXPECT(result.code() == Code::kPeerLost);
  EXPECT_EQ(n, size_t{0});
}

TEST(TlsNoticesAByteThatWasChanged) {
  if (!check::CanEncrypt()) return;
  Wire wire;
  wire.Shake();
  const std::string out(50000, 'x');
  std::string in(50000, '\0');
  size_t n = 0;
  EXPECT(wire.ends[kClient]->Send(out.data(), 20000, &n).ok());
  wire.Carry(kClient);
  EXPECT(wire.ends[kServer]->Recv(in.data(), in.size(), &n).ok());
  EXPECT_EQ(n, size_t{20000});
  EXPECT(wire.ends[kClient]->Send(out.data(), 20000, &n).ok());
  wire.spoil = true;
  wire.Carry(kClient);
  Result result = wire.ends[kServer]->Recv(in.data(), in.size(), &n);
  if (result.ok()) result = wire.ends[kServer]->Recv(in.data(), in.size(), &n);
  EXPECT(result.code() == Code::kPeerLost);
  EXPECT_CONTAINS(result.Report(), "its encrypted connection failed: ");
  EXPECT(!wire.ends[kServer]->closed());
}

// Said or sudden, in the middle of a record or not: what came before is taken, then it is closed.
TEST(TlsTellsItsEnd) {
  if (!check::CanEncrypt()) return;
  for (const int how : {0, 1, 2}) {
    Wire wire;
    wire.Shake();
    const std::string out = how == 2 ? std::string(1000, 'x') : "last words";
    char in[2000];
    size_t n = 0;
    EXPECT(wire.ends[kClient]->Send(out.data(), out.size(), &n).ok());
    if (how == 0) wire.ends[kClient]->Close();
    if (how == 2) wire.room = 300;
    wire.Carry(kClient);
    if (how != 0) wire.far[kServer].Close();
    Result result = wire.ends[kServer]->Recv(in, sizeof in, &n);
    if (how != 2) {
      EXPECT(result.ok());
      EXPECT_EQ(std::string(in, n), out);
      result = wire.ends[kServer]->Recv(in, sizeof in, &n);
    }
    EXPECT(result.code() == Code::kPeerLost);
    EXPECT_EQ(n, size_t{0});
    EXPECT(wire.ends[kServer]->closed());
    EXPECT(!wire.ends[kServer]->Peek(in, 1, &n).ok());
  }
}

TEST(TlsSaysWhichLibraryIsMissing) {
  openssl::Api api{};
  const Result none = openssl::Load("libssl-of-nobody.so.3", &api);
  EXPECT(none.code() == Code::kInvalid);
  EXPECT_CONTAINS(none.Report(), "SPARKVOD_TLS=1");
  EXPECT_CONTAINS(none.Report(), "libssl-of-nobody.so.3 cannot be loaded");
  const Result another = openssl::Load("libc.so.6", &api);
  EXPECT(another.code() == Code::kInvalid);
  EXPECT_CONTAINS(another.Report(), "libc.so.6 lacks");
  EXPECT_CONTAINS(another.Report(), "SSL_new");
}

}  // namespace
}  // namespace sparkvod
