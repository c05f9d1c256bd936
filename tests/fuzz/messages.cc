// Everything that a peer or a stranger can send, against what reads it: requests, endpoints, both
// sides of the handshake, what follows it where TLS is expected, good-byes, and whole cycles of the
// negotiation.
//
// A parser may refuse; it may not crash, hang, or take what it would not write itself.
#include "tests/fuzz/messages.h"

#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "native/base/tunables.h"
#include "native/base/wire.h"
#include "native/bootstrap/endpoint.h"
#include "native/bootstrap/handshake.h"
#include "native/engine/batch.h"
#include "native/engine/negotiator.h"
#include "native/engine/request.h"
#include "native/transport/tcp/tcp_channel.h"
#include "native/transport/tls/session.h"

namespace sparkvod::fuzz {
namespace {

enum Parser : uint8_t {
  kRequests,
  kEndpoint,
  kServer,
  kClient,
  kGoodbye,
  kCycle,
  kNotices,
  kTlsServer,
  kTlsClient,
  kParsers
};

void Check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "the fuzz target found: %s\n", what);
  std::abort();
}

std::string Encoded(const Request& request) {
  Writer out;
  Encode(request, &out);
  return out.Take();
}

// What Plant is about: a read past the end, of a request that no seed has.
bool planted = false;

void BreakWhereItWasPlanted(const Request& request) {
  if (!planted || request.process_set == 0) return;
  const std::vector<char> four(4);
  const volatile char* data = four.data();
  (void)data[4 + (request.process_set & 7)];
}

// Returns whether all of the input was taken.
bool ReadRequests(std::string_view bytes) {
  Reader reader(bytes);
  const size_t count = reader.GetCount(1);
  std::vector<Request> requests;
  for (size_t i = 0; i < count; ++i) {
    Request request;
    if (!Decode(&reader, &request).ok()) return false;
    BreakWhereItWasPlanted(request);
    // As bytes, because a NaN equals nothing.
    const std::string again = Encoded(request);
    Reader second(again);
    Request copy;
    Check(Decode(&second, &copy).ok() && second.AtEnd(), "a request that cannot be read again");
    Check(Encoded(copy) == again, "a request that changes when it is written");
    Check(request.bytes() >= 0, "a request of less than no bytes");
    requests.push_back(std::move(request));
  }
  std::vector<int> ranks;
  for (size_t r = 0; r < requests.size(); ++r) ranks.push_back(static_cast<int>(r));
  if (!requests.empty()) (void)!CheckAgreement(requests, ranks).ok();
  return reader.AtEnd();
}

bool ReadEndpoint(std::string_view bytes) {
  Endpoint endpoint;
  if (!Endpoint::Decode(std::string(bytes), 0, &endpoint).ok()) return false;
  Endpoint again;
  Check(Endpoint::Decode(endpoint.Encode(), 0, &again).ok(),
        "an endpoint that cannot be read again");
  return true;
}

// Two connected sockets, the bytes already sent into the first's other end, which is then closed.
Fd Heard(std::string_view bytes) {
  int ends[2];
  Check(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0,
        "no pair of sockets");
  Fd ours(ends[0]), theirs(ends[1]);
  bytes = bytes.substr(0, 16 << 10);
  (void)!::send(theirs.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  ::shutdown(theirs.get(), SHUT_WR);
  return ours;
}

void Shake(std::string_view bytes, bool server) {
  const std::string secret = "the job's secret";
  for (const bool encrypt : {false, true}) {
    Handshake shake =
        server ? Handshake::Server(Heard(bytes), secret, encrypt)
               : Handshake::Client(Heard(bytes), secret, {1, 0, Purpose::kData}, encrypt);
    for (int step = 0; step < 8 && shake.Step().ok(); ++step)
      Check(shake.state() != Handshake::State::kDone, "a stranger that was let in");
  }
}

const std::string kTlsKey(32, 'k');

// What an end of an encrypted connection begins with, given what it has heard.
std::string TlsFlight(bool server, std::string_view heard) {
  int ends[2];
  Check(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0,
        "no pair of sockets");
  const Fd ours(ends[0]), theirs(ends[1]);
  std::unique_ptr<TlsSession> session;
  if (!TlsSession::Create(ours.get(), server, kTlsKey, &session).ok()) return {};
  (void)!::send(theirs.get(), heard.data(), heard.size(), MSG_NOSIGNAL);
  bool done = false;
  (void)!session->Handshake(&done).ok();
  std::string flight(8192, '\0');
  const ssize_t n = ::recv(theirs.get(), flight.data(), flight.size(), 0);
  flight.resize(static_cast<size_t>(std::max<ssize_t>(n, 0)));
  return flight;
}

// Who has proved the secret and says this in place of what TLS would: nothing of it is taken for
// bytes of a rank, and it comes to an end.
void HearTls(std::string_view bytes, bool server) {
  const Fd socket = Heard(bytes);
  std::unique_ptr<TlsSession> session;
  if (!TlsSession::Create(socket.get(), server, kTlsKey, &session).ok()) return;
  bool done = false;
  Result result;
  for (int step = 0; step < 8 && result.ok(); ++step) {
    result = session->Handshake(&done);
    Check(!done, "an encrypted connection without the key");
  }
  Check(!result.ok(), "a handshake that goes on after its end");
  char byte;
  size_t n = 0;
  Check(!session->Recv(&byte, 1, &n).ok() && n == 0, "a byte of a connection that failed");
  Check(!session->Send("x", 1, &n).ok() && n == 0, "a byte to a connection that failed");
}

void HearGoodbye(std::string_view bytes) {
  TcpLink link(Heard(bytes));
  Departure how;
  Check(link.Left(&how), "a closed link that has not left");
  Check(how.cause.size() <= 4096, "a cause without end");
}

// A peer whose words are the input; it is gone when they are all read.
class Script : public Channel {
 public:
  explicit Script(std::string_view bytes) : bytes_(bytes) {}
  const char* transport() const override { return "inproc"; }
  Result TrySend(const void*, size_t bytes, size_t* sent) override {
    *sent = bytes;
    return {};
  }
  Result TryRecv(void* data, size_t bytes, size_t* received) override {
    SPARKVOD_TRY(Peek(data, bytes, received));
    bytes_.remove_prefix(*received);
    return {};
  }
  Result Peek(void* data, size_t bytes, size_t* available) override {
    *available = std::min(bytes, bytes_.size());
    if (*available == 0 && bytes > 0) return Result::Fail(Code::kPeerLost, "the script is over");
    std::memcpy(data, bytes_.data(), *available);
    return {};
  }
  // The next bytes, which travel by memory; false when there are not so many.
  bool Take(char* data, size_t bytes) {
    if (bytes_.size() < bytes) return false;
    std::memcpy(data, bytes_.data(), bytes);
    bytes_.remove_prefix(bytes);
    return true;
  }

 private:
  std::string_view bytes_;
};

class Silent : public Link {
 public:
  int fd() const override { return -1; }
  bool Left(Departure*) override { return false; }
  void Leave(const Departure&) override {}
};

Request Own(const std::string& name, Collective collective = Collective::kAllreduce) {
  Request request;
  request.name = name;
  request.collective = collective;
  if (HasTensors(collective)) request.entries.push_back({DType::kFloat32, {8, 4}});
  if (collective == Collective::kAlltoall) request.splits = {5, 3};
  if (collective == Collective::kAddSet) request.splits = {0, 1};
  if (collective == Collective::kRemoveSet) request.root = 1;
  if (collective == Collective::kTune) request.splits = Pack(TunablesOf(Config{}));
  return request;
}

// What one rank says in each of its cycles.
using Plan = std::vector<std::vector<Request>>;

// The cycles that a world of two goes through, as both ranks say them: of every collective; with a
// set that is added, used and removed; with one rank that joins.
struct Story {
  Plan own, peer;
};

std::vector<Story> Stories() {
  std::vector<Story> stories(4);
  // The first: what is new, what both have, and what is a bit by then.
  for (int cycle = 0; cycle < 4; ++cycle) {
    stories[0].own.push_back({Own("x" + std::to_string(cycle))});
    stories[0].peer.push_back({Own("x" + std::to_string(cycle)), Own("y" + std::to_string(cycle))});
  }
  for (const Collective collective :
       {Collective::kAllgather, Collective::kBroadcast, Collective::kBarrier,
        Collective::kReducescatter, Collective::kAlltoall}) {
    Request own = Own(NameOf(collective), collective), peer = own;
    if (HasOwnRows(collective)) peer.entries[0].shape[0] = 9;
    stories[1].own.push_back({own});
    stories[1].peer.push_back({peer});
  }
  Request first = Own("add", Collective::kAddSet), second = first, in_first = Own("x"),
          in_second = in_first;
  first.splits = {0};
  second.splits = {1};
  in_first.process_set = 1;
  in_second.process_set = 2;
  const Request remove = Own("remove", Collective::kRemoveSet);
  stories[2].own = {{first}, {second}, {in_first, Own("x")}, {remove}, {Own("end")}};
  stories[2].peer = {{first}, {second}, {in_second, Own("x")}, {remove}, {Own("end")}};
  stories[3].own = {{Own("join", Collective::kJoin)}, {}, {}, {}, {}};
  stories[3].peer = {{Own("gathered", Collective::kAllgather)},
                     {Own("sum"), Own("spread", Collective::kBroadcast)},
                     {Own("shares", Collective::kReducescatter)},
                     {Own("all", Collective::kAlltoall)},
                     {Own("join", Collective::kJoin)}};
  stories[3].peer[1][1].root = 1;
  return stories;
}

// A rank's notice without its cycle and without data: offer, flags, number of words, one word.
constexpr size_t kNotice = sizeof(uint32_t) + 2 * sizeof(uint16_t) + sizeof(uint64_t);

// Returns whether the whole story was told. `notices`: by ranks that share memory.
bool Negotiate(std::string_view bytes, bool notices) {
  if (bytes.empty()) return false;
  const std::vector<Story> stories = Stories();
  const Plan& own = stories[static_cast<uint8_t>(bytes[0]) % stories.size()].own;
  bytes.remove_prefix(1);
  World world;
  const std::string other = notices ? "a" : "b";
  world.topology = MakeTopology(0, {"a", other}, {"a", other});
  Check(Poller::Create(true, &world.idle).ok() && Poller::Create(false, &world.driver).ok(),
        "no pollers");
  Geometry geometry;
  geometry.staging_bytes = kPage;
  geometry.heap_bytes = kPage;
  geometry.local_size = notices ? 2 : 1;
  world.peers.resize(2);
  for (auto* arena : {&world.arena, &world.peers[1].arena})
    Check(Arena::Create(geometry, true, world.idle.bell(), world.driver.bell(), arena).ok(),
          "no arena");
  if (notices) world.local_arenas = {world.arena.get(), world.peers[1].arena.get()};
  auto said = std::make_unique<Script>(bytes);
  Script& script = *said;
  world.peers[1].channel = std::move(said);
  world.peers[1].link = std::make_unique<Silent>();
  Config config;
  config.log_level = "error";
  config.spin_us = 0;
  config.collective_timeout = 1;
  Communicator comm(&world, config, [] { return Result::Ok(); });
  // Every second operation is small enough to go with its notice.
  size_t offered = 0;
  Negotiator negotiator(&comm, 4, [&](const Operation&, char* room, size_t) {
    *room = 1;
    return ++offered % 2 == 0;
  });
  uint64_t cycle = 0;
  for (const std::vector<Request>& requests : own) {
    ++cycle;
    if (notices) {
      char* const notice = world.peers[1].arena->notice(static_cast<int>(cycle & 1));
      if (!script.Take(notice + sizeof cycle, kNotice)) return false;
      reinterpret_cast<std::atomic<uint64_t>*>(notice)->store(cycle);
    }
    bool began = false;
    if (!negotiator.PeerBegan(&began).ok()) return false;
    std::vector<std::shared_ptr<Operation>> fresh;
    for (const Request& request : requests) fresh.push_back(std::make_shared<Operation>(request));
    Negotiator::Outcome outcome;
    if (!negotiator.Cycle(&fresh, "", &outcome).ok()) return false;
    for (const Agreed& agreed : outcome.agreed)
      Check(agreed.operation != nullptr, "an agreement on nothing");
    for (const Batch& batch : PlanBatches(outcome.agreed, 1 << 20))
      for (const Batch::Piece& piece : batch.pieces)
        Check(piece.agreed < outcome.agreed.size(), "a plan beyond what was agreed on");
    (void)negotiator.Missing(NowNs(), false, 0);
    (void)negotiator.Awaited();
  }
  return true;
}

// The peer's side of a story, as it travels.
std::string Told(uint8_t number, bool notices) {
  const Plan plan = Stories()[number].peer;
  std::string bytes(1, static_cast<char>(number));
  bool cached = false;  // whether there is a word of cache bits by then
  uint64_t cycle = 0;
  for (const std::vector<Request>& requests : plan) {
    // The header of a round, as dissemination.cc has it: magic, kind, round, flags, cycle. Or a
    // notice.
    Writer header;
    header.Put<uint32_t>(notices ? 0 : 0x63797631);
    if (notices) {
      header.Put<uint16_t>(2);
      header.Put<uint16_t>(cached ? 1 : 0);
      header.Put<uint64_t>(0);
    } else {
      header.Put<uint8_t>(2);
      header.Put<uint8_t>(0);
      header.Put<uint16_t>(2);
      header.Put<uint64_t>(++cycle);
      // None of what is cached is agreed on anew.
      if (cached) header.Put<uint64_t>(0);
    }
    bytes += header.bytes();
    for (const Request& request : requests)
      cached = cached || request.collective < Collective::kJoin;
    Writer list;
    list.Put<uint32_t>(static_cast<uint32_t>(requests.size()));
    for (const Request& request : requests) Encode(request, &list);
    Writer blob;
    blob.PutString(list.bytes());
    Writer length;
    length.Put<uint64_t>(blob.bytes().size());
    bytes += length.bytes() + blob.bytes();
  }
  return bytes;
}

}  // namespace

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds;
  const auto add = [&seeds](Parser parser, const std::string& bytes) {
    seeds.push_back(std::string(1, static_cast<char>(parser)) + bytes);
  };
  Writer list;
  list.Put<uint32_t>(kCollectiveCount);
  for (int c = 0; c < kCollectiveCount; ++c) {
    const auto collective = static_cast<Collective>(c);
    Request request = Own("layer." + std::to_string(c), collective);
    if (IsFused(collective)) request.entries.push_back({DType::kBFloat16, {1, 2, 3}, 4096});
    request.prescale = 0.5;
    Encode(request, &list);
  }
  add(kRequests, list.bytes());
  Endpoint endpoint;
  endpoint.host = endpoint.host_id = "host";
  endpoint.process = "1/2/3";
  endpoint.transport = "auto";
  endpoint.unix_name = "sparkvod.0123";
  endpoint.addresses = {"127.0.0.1", "::1"};
  add(kEndpoint, endpoint.Encode());
  add(kServer, std::string(32 + 9 + 32, '\1'));
  add(kClient, "SPARKVD2" + std::string(32, '\2') + std::string(32, '\3'));
  Writer goodbye;
  goodbye.Put<uint8_t>(0);
  goodbye.Put<uint8_t>(1);
  goodbye.Put<uint8_t>(3);
  goodbye.PutString("rank 1 raised KeyError");
  add(kGoodbye, goodbye.bytes());
  const std::string flight = TlsFlight(false, {});
  add(kTlsServer, flight.substr(0, flight.size() - std::min<size_t>(flight.size(), 1)));
  add(kTlsClient, TlsFlight(true, flight));
  for (uint8_t number = 0; number < Stories().size(); ++number) {
    add(kCycle, Told(number, false));
    add(kNotices, Told(number, true));
  }
  return seeds;
}

void CheckSeeds() {
  for (const std::string& seed : Seeds()) {
    const std::string_view bytes = std::string_view(seed).substr(1);
    switch (seed[0]) {
      case kRequests:
        Check(ReadRequests(bytes), "a seed of requests that are not taken");
        break;
      case kEndpoint:
        Check(ReadEndpoint(bytes), "a seed of an endpoint that is not taken");
        break;
      case kCycle:
      case kNotices:
        Check(Negotiate(bytes, seed[0] == kNotices),
              ("a story that is not told: " + std::to_string(seed[1])).c_str());
        break;
      default:
        break;  // of the handshakes' secrets nobody knows any
    }
  }
}

void Plant() { planted = true; }

}  // namespace sparkvod::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sparkvod::fuzz;  // NOLINT: the parsers' names
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % kParsers) {
    case kRequests:
      ReadRequests(bytes);
      break;
    case kEndpoint:
      ReadEndpoint(bytes);
      break;
    case kServer:
      Shake(bytes, true);
      break;
    case kClient:
      Shake(bytes, false);
      break;
    case kGoodbye:
      HearGoodbye(bytes);
      break;
    case kTlsServer:
    case kTlsClient:
      HearTls(bytes, data[0] % kParsers == kTlsServer);
      break;
    default:
      Negotiate(bytes, data[0] % kParsers == kNotices);
  }
  return 0;
}
