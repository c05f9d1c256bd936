// Worlds that come together, worlds that cannot, and strangers who knock meanwhile.
#include "native/bootstrap/bootstrap.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "native/base/clock.h"
#include "native/bootstrap/handshake.h"
#include "native/transport/socket.h"
#include "tests/native/check.h"
#include "tests/native/ranks.h"

namespace sparkvod {
namespace {

using check::Board;

Config TestConfig() {
  Config config;
  config.log_level = "error";  // dropped strangers are logged as warnings
  config.transport = "tcp";
  config.address = "127.0.0.1";
  config.start_timeout = 20;
  config.arena_bytes = 1 << 20;
  return config;
}

// One that listens, and the world that it joins.
struct Rank {
  explicit Rank(const Config& config) {
    EXPECT(Bootstrap::Listen(config, &bootstrap, &endpoint).ok());
  }
  Result Connect(int rank, const std::vector<std::string>& endpoints,
                 const std::string& secret = "s",
                 const std::function<bool()>& interrupted = nullptr) {
    return bootstrap->Connect(rank, endpoints, secret, interrupted, &world);
  }

  std::unique_ptr<Bootstrap> bootstrap;
  std::string endpoint;
  std::unique_ptr<World> world;
};

TEST(BootstrapJoinsWorldsOfEverySize) {
  for (int size : {1, 2, 3, 8}) {
    for (const char* transport : {"auto", "tcp"}) {
      check::RunThreads(size, [&](int rank, Board& board) {
        Config config = TestConfig();
        config.transport = transport;
        Rank own(config);
        EXPECT_EQ(own.Connect(rank, board.Gather(rank, own.endpoint)).Report(), "ok");
        if (own.world != nullptr) {
          const Topology& topology = own.world->topology;
          EXPECT_EQ(topology.rank, rank);
          EXPECT_EQ(topology.size, size);
          EXPECT_EQ(topology.local_size, size);
          EXPECT_EQ(topology.cross_size, 1);
        }
        board.Barrier(rank);
      });
    }
  }
}

TEST(BootstrapGroupsRanksByHost) {
  const Topology t = MakeTopology(3, {"a", "b", "a", "b", "c"}, {"A", "B", "A", "B", "C"});
  EXPECT_EQ(t.local_rank, 1);
  EXPECT_EQ(t.local_size, 2);
  EXPECT_EQ(t.cross_rank, 1);
  EXPECT_EQ(t.cross_size, 2);
  EXPECT(!t.homogeneous);
  EXPECT(t.local_ranks == (std::vector<int>{1, 3}));
  EXPECT(MakeTopology(0, {"a", "b"}, {"A", "B"}).homogeneous);
}

// In the clear, and encrypted where that can be.
std::vector<bool> ClearAndEncrypted() {
  return check::CanEncrypt() ? std::vector<bool>{false, true} : std::vector<bool>{false};
}

TEST(BootstrapRefusesAnotherSecret) {
  for (const bool tls : ClearAndEncrypted()) {
    check::RunThreads(2, [tls](int rank, Board& board) {
      Config config = TestConfig();
      config.start_timeout = 0.5;
      config.tls = tls;
      Rank own(config);
      const Result result =
          own.Connect(rank, board.Gather(rank, own.endpoint), rank == 0 ? "right" : "wrong");
      EXPECT(result.code() == Code::kTimeout);
      EXPECT_CONTAINS(result.Report(), "rank " + std::to_string(1 - rank));
      board.Barrier(rank);
    });
  }
}

TEST(BootstrapEncryptsOnAllRanksOrOnNone) {
  if (!check::CanEncrypt()) return;
  check::RunThreads(3, [](int rank, Board& board) {
    Config config = TestConfig();
    config.tls = rank != 1;
    Rank own(config);
    const Result result = own.Connect(rank, board.Gather(rank, own.endpoint));
    EXPECT(result.code() == Code::kInvalid);
    EXPECT_CONTAINS(result.Report(), rank == 1 ? "SPARKVOD_TLS is 0 on rank 1 and 1 on rank 0"
                                               : "and 0 on rank 1; set one value on all ranks");
    board.Barrier(rank);
  });
}

TEST(BootstrapNamesTheRankThatIsMissing) {
  Config config = TestConfig();
  config.start_timeout = 0.3;
  Rank one(config), other(config);
  const Result result = one.Connect(0, {one.endpoint, other.endpoint});
  EXPECT(result.code() == Code::kTimeout);
  EXPECT_CONTAINS(result.Report(), "rank 1");
  EXPECT_CONTAINS(result.Report(), "SPARKVOD_START_TIMEOUT");
}

TEST(BootstrapSaysWhatIsWrongWithItsArguments) {
  Rank one(TestConfig());
  EXPECT(one.Connect(1, {one.endpoint}).code() == Code::kInvalid);
  const std::string cut = one.endpoint.substr(0, one.endpoint.size() - 1);
  for (const std::string& wrong : {std::string("rubbish"), cut, std::string()})
    EXPECT(one.Connect(0, {wrong}).code() == Code::kInvalid);
}

TEST(BootstrapStopsWhenItIsInterrupted) {
  Rank one(TestConfig()), other(TestConfig());
  const int64_t start = NowNs();
  const Result result = one.Connect(0, {one.endpoint, other.endpoint}, "s", [] { return true; });
  EXPECT(result.code() == Code::kShutDown);
  EXPECT(NowNs() - start < int64_t{2} * 1000000000);
}

// Connects to a rank's port without being one of its peers.
Fd Knock(const std::string& endpoint) {
  Endpoint peer;
  EXPECT(Endpoint::Decode(endpoint, 0, &peer).ok());
  Fd fd;
  EXPECT(StartConnectTcp("127.0.0.1", peer.port, &fd).ok());
  return fd;
}

// Goes through a handshake with somebody who runs elsewhere.
void Shake(Handshake* handshake) {
  const Deadline deadline = Deadline::After(5);
  while (!deadline.Passed() && handshake->Step().ok() &&
         handshake->state() != Handshake::State::kDone)
    ::usleep(1000);
}

// Who has proved the secret is no stranger: he is named.
TEST(BootstrapNamesTheRankThatCannotEncrypt) {
  if (!check::CanEncrypt()) return;
  Config config = TestConfig();
  config.tls = true;
  config.start_timeout = 0.5;
  Rank one(config), other(config);
  const std::vector<std::string> endpoints = {one.endpoint, other.endpoint};
  std::thread liar([&, fd = Knock(one.endpoint)]() mutable {
    Handshake handshake =
        Handshake::Client(std::move(fd), WorldKey("s", endpoints), Hello{1, 0, Purpose::kData});
    Shake(&handshake);
    Stream stream = handshake.TakeStream();
    size_t n = 0;
    const std::string rubbish(300, 'G');
    EXPECT(stream.Send(rubbish.data(), rubbish.size(), &n).ok());
    ::usleep(200000);
  });
  const Result result = one.Connect(0, endpoints);
  liar.join();
  EXPECT(result.code() == Code::kTimeout);
  EXPECT_CONTAINS(result.Report(), "missing: rank 1 on ");
  EXPECT_CONTAINS(result.Report(), "the connection could not be encrypted");
}

// What a client of TLS begins with, as it goes over the wire.
std::string FirstFlight() {
  int fds[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
  const Fd near(fds[0]), far(fds[1]);
  std::unique_ptr<TlsSession> session;
  EXPECT(TlsSession::Create(near.get(), false, std::string(32, 'k'), &session).ok());
  bool done = false;
  EXPECT(session->Handshake(&done).ok());
  std::string flight(4096, '\0');
  const ssize_t n = ::recv(far.get(), flight.data(), flight.size(), 0);
  flight.resize(static_cast<size_t>(std::max<ssize_t>(n, 0)));
  EXPECT(flight.size() > 100);
  return flight;
}

// A hello that knows nothing newer than TLS 1.2.
std::string OldHello() {
  const std::string body =
      std::string("\3\3", 2) + std::string(32, 'r') + std::string("\0\0\4\xc0\x2f\0\x2f\1\0", 9);
  const auto length = static_cast<char>(body.size());
  return std::string("\x16\3\1\0", 4) + static_cast<char>(body.size() + 4) +
         std::string("\1\0\0", 3) + length + body;
}

// Who proves the secret and then says this in place of what TLS would, as strangers cannot and a
// rank that was tampered with might, keeps nobody from coming together.
TEST(BootstrapIsNotDisturbedByWhatIsNoTls) {
  if (!check::CanEncrypt()) return;
  const std::string flight = FirstFlight();
  for (const bool proved : {true, false})
    for (const std::string& words :
         {std::string(), flight.substr(0, 3), flight.substr(0, flight.size() / 2),
          flight.substr(0, 60) + std::string(300, 'G'), flight, OldHello(),
          std::string("\x15\3\3\0\2\2\50", 7), std::string(5000, 'G')}) {
      Config config = TestConfig();
      config.tls = true;
      Rank one(config), other(config);
      const std::vector<std::string> endpoints = {one.endpoint, other.endpoint};
      std::thread liar([&, fd = Knock(one.endpoint)]() mutable {
        Fd raw(::dup(fd.get()));
        std::unique_ptr<Handshake> handshake;
        if (proved) {
          handshake = std::make_unique<Handshake>(Handshake::Client(
              std::move(fd), WorldKey("s", endpoints), Hello{1, 0, Purpose::kData}));
          Shake(handshake.get());
        }
        (void)!::send(raw.get(), words.data(), words.size(), MSG_NOSIGNAL);
        ::usleep(300000);
      });
      ::usleep(20000);
      const int64_t began = NowNs();
      Result of_other;
      std::thread peer([&] { of_other = other.Connect(1, endpoints); });
      const Result result = one.Connect(0, endpoints);
      peer.join();
      EXPECT_EQ(result.Report(), "ok");
      EXPECT_EQ(of_other.Report(), "ok");
      EXPECT((NowNs() - began) * 1e-9 < 2);
      liar.join();
    }
}

// Some say nothing, some talk rubbish, some go at once, some know another secret: the world comes
// together all the same.
void JoinAmongStrangers(bool tls) {
  check::RunThreads(2, [tls](int rank, Board& board) {
    Config config = TestConfig();
    config.tls = tls;
    Rank own(config);
    std::vector<Fd> strangers;
    if (rank == 0) {
      for (int i = 0; i < 20; ++i) {
        strangers.push_back(Knock(own.endpoint));
        const std::string rubbish(static_cast<size_t>(i) * 40, 'G');
        (void)!::send(strangers.back().get(), rubbish.data(), rubbish.size(), MSG_NOSIGNAL);
        if (i % 3 == 0) strangers.back().Close();
      }
    }
    const auto endpoints = board.Gather(rank, own.endpoint);
    std::thread liar;
    if (rank == 0) {
      liar = std::thread([fd = Knock(own.endpoint)]() mutable {
        Handshake handshake =
            Handshake::Client(std::move(fd), "another", Hello{1, 0, Purpose::kData});
        Shake(&handshake);
        EXPECT(handshake.state() != Handshake::State::kDone);
      });
    }
    EXPECT_EQ(own.Connect(rank, endpoints).Report(), "ok");
    board.Barrier(rank);
    own.world.reset();
    own.bootstrap.reset();
    if (liar.joinable()) liar.join();
  });
}

TEST(BootstrapIsNotDisturbedByStrangers) {
  for (const bool tls : ClearAndEncrypted()) JoinAmongStrangers(tls);
}

// Rank 1 of an earlier attempt, which knows the secret and goes on looking for its rank 0 where the
// rank 0 of the next attempt listens now: it stays out, and the new world comes together.
TEST(BootstrapKeepsRanksOfEarlierAttemptsOut) {
  for (const bool tls : ClearAndEncrypted()) {
    Config config = TestConfig();
    config.tls = tls;
    Rank old(config);
    std::string of_old_root;
    Endpoint place;
    {
      const Rank gone(config);
      of_old_root = gone.endpoint;
      EXPECT(Endpoint::Decode(of_old_root, 0, &place).ok());
    }
    config.port_range = std::to_string(place.port) + "-" + std::to_string(place.port);
    Rank root(config);
    config.port_range = "";
    Rank other(config);
    // It takes the new rank 0 for its own, which an explicit host hides from its look at listeners.
    Endpoint found;
    EXPECT(Endpoint::Decode(root.endpoint, 0, &found).ok());
    place.unix_name = found.unix_name;
    std::atomic<bool> over{false};
    Result of_old;
    std::thread retrying([&] {
      of_old = old.Connect(1, {place.Encode(), old.endpoint}, "s", [&] { return over.load(); });
    });
    ::usleep(300000);  // it knocks before the new world's rank 1 does
    Result of_other;
    const std::vector<std::string> endpoints = {root.endpoint, other.endpoint};
    std::thread peer([&] {
      ::usleep(300000);
      of_other = other.Connect(1, endpoints);
    });
    EXPECT_EQ(root.Connect(0, endpoints).Report(), "ok");
    peer.join();
    EXPECT_EQ(of_other.Report(), "ok");
    over = true;
    retrying.join();
    EXPECT(!of_old.ok());
    EXPECT(old.world == nullptr);
  }
}

// A flood of connections of another user, who can see the names of abstract sockets.
TEST(BootstrapIsNotDelayedByAnotherUsersFlood) {
  if (::geteuid() != 0 || !check::CanFork()) return;  // only root can become somebody else
  Config config = TestConfig();
  config.transport = "shm";
  check::RunProcesses(2, [&](int rank, Board& board) {
    Rank own(config);
    const auto endpoints = board.Gather(rank, own.endpoint);
    std::vector<pid_t> flood;
    for (int n = 0; rank == 0 && n < 2; ++n) {
      const pid_t pid = ::fork();
      if (pid != 0) {
        flood.push_back(pid);
        continue;
      }
      Endpoint root;
      if (::setuid(65534) != 0 || !Endpoint::Decode(endpoints[0], 0, &root).ok()) ::_exit(1);
      std::vector<Fd> held(900);  // whose handshakes are never done
      for (size_t i = 0;; ++i) (void)!StartConnectUnix(root.unix_name, &held[i % held.size()]).ok();
    }
    if (rank == 0) ::usleep(300000);
    const int64_t began = NowNs();
    EXPECT_EQ(own.Connect(rank, endpoints).Report(), "ok");
    EXPECT((NowNs() - began) * 1e-9 < 5);
    board.Barrier(rank);
    for (const pid_t pid : flood) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  });
}

// Runs both ends of a handshake over a pair of sockets.
void Shake(Handshake* a, Handshake* b, Result* of_a, Result* of_b) {
  for (int step = 0; step < 20; ++step) {
    if (of_a->ok() && a->state() != Handshake::State::kDone) *of_a = a->Step();
    if (of_b->ok() && b->state() != Handshake::State::kDone) *of_b = b->Step();
  }
}

TEST(HandshakeProvesTheSecretBothWays) {
  for (const bool same : {true, false}) {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    Handshake server = Handshake::Server(Fd(fds[0]), "secret");
    Handshake client =
        Handshake::Client(Fd(fds[1]), same ? "secret" : "Secret", Hello{3, 1, Purpose::kLink});
    Result of_server, of_client;
    Shake(&server, &client, &of_server, &of_client);
    EXPECT_EQ(of_server.ok(), same);
    EXPECT_EQ(server.state() == Handshake::State::kDone, same);
    EXPECT_EQ(client.state() == Handshake::State::kDone, same);
    if (!same) continue;
    EXPECT_EQ(server.hello().from, 3);
    EXPECT_EQ(server.hello().to, 1);
    EXPECT(server.hello().purpose == Purpose::kLink);
  }
}

// What proved the secret once does not prove it again: the server's nonce is another one.
TEST(HandshakeCannotBeReplayed) {
  std::string heard;
  for (const bool replay : {false, true}) {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    Handshake server = Handshake::Server(Fd(fds[0]), "secret");
    EXPECT(server.Step().ok());
    Fd wire(fds[1]);
    if (!replay) {
      // The client talks to the server through this test, which listens.
      int inner[2];
      EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, inner), 0);
      Handshake client = Handshake::Client(Fd(inner[0]), "secret", Hello{1, 0, Purpose::kData});
      Fd near(inner[1]);
      char buffer[256];
      ssize_t n = ::recv(wire.get(), buffer, sizeof(buffer), 0);
      EXPECT_EQ(::send(near.get(), buffer, static_cast<size_t>(n), 0), n);
      EXPECT(client.Step().ok());
      n = ::recv(near.get(), buffer, sizeof(buffer), 0);
      heard.assign(buffer, static_cast<size_t>(n));
    }
    EXPECT_EQ(::send(wire.get(), heard.data(), heard.size(), 0),
              static_cast<ssize_t>(heard.size()));
    EXPECT_EQ(server.Step().ok(), !replay);
  }
}

// Two ends that have proved the secret, over a pair of sockets. `purpose` says whether the bytes
// that follow are encrypted.
TEST(HandshakeGoesOnEncrypted) {
  if (!check::CanEncrypt()) return;
  for (const Purpose purpose : {Purpose::kData, Purpose::kLink, Purpose::kShared}) {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    Handshake server = Handshake::Server(Fd(fds[0]), "secret", true);
    Handshake client = Handshake::Client(Fd(fds[1]), "secret", Hello{1, 0, purpose}, true);
    Result of_server, of_client;
    Shake(&server, &client, &of_server, &of_client);
    EXPECT_EQ(of_server.Report() + of_client.Report(), "okok");
    Stream here = server.TakeStream(), there = client.TakeStream();
    EXPECT_EQ(here.encrypted(), purpose != Purpose::kShared);
    EXPECT_EQ(there.encrypted(), purpose != Purpose::kShared);
    size_t n = 0;
    char word[8];
    EXPECT(there.Send("hello", 5, &n).ok());
    EXPECT(here.Recv(word, sizeof word, &n).ok());
    EXPECT_EQ(std::string(word, n), "hello");
  }
}

// Who passes the proof on between two ranks knows no key after it.
TEST(HandshakeDropsWhoCannotEncryptAfterTheProof) {
  if (!check::CanEncrypt()) return;
  for (const bool honest_server : {false, true}) {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    Handshake server = Handshake::Server(Fd(fds[0]), "secret", honest_server);
    Handshake client =
        Handshake::Client(Fd(fds[1]), "secret", Hello{1, 0, Purpose::kData}, !honest_server);
    Result of_server, of_client;
    Shake(&server, &client, &of_server, &of_client);
    Handshake& honest = honest_server ? server : client;
    EXPECT(honest.state() != Handshake::State::kDone);
    Stream liar = (honest_server ? client : server).TakeStream();
    size_t n = 0;
    const std::string rubbish(300, 'G');
    EXPECT(liar.Send(rubbish.data(), rubbish.size(), &n).ok());
    const Result result = honest.Step();
    EXPECT(result.code() == Code::kPeerLost);
    EXPECT_CONTAINS(result.Report(), "the connection could not be encrypted");
  }
}

}  // namespace
}  // namespace sparkvod
