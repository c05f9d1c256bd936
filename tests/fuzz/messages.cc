// Everything that a peer or a stranger can send, against what reads it: requests, endpoints, both
// sides of the handshake, good-byes, and whole cycles of the negotiation.
//
// A parser may refuse; it may not crash, hang, or take what it would not write itself.
#include "tests/fuzz/messages.h"

#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "native/base/wire.h"
#include "native/bootstrap/endpoint.h"
#include "native/bootstrap/handshake.h"
#include "native/engine/negotiator.h"
#include "native/engine/request.h"
#include "native/transport/tcp/tcp_channel.h"

namespace sparkvod::fuzz {
namespace {

enum Parser : uint8_t { kRequests, kEndpoint, kServer, kClient, kGoodbye, kCycle, kParsers };

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

void ReadRequests(std::string_view bytes) {
  Reader reader(bytes);
  const size_t count = reader.GetCount(1);
  std::vector<Request> requests;
  for (size_t i = 0; i < count; ++i) {
    Request request;
    if (!Decode(&reader, &request).ok()) return;
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
}

void ReadEndpoint(std::string_view bytes) {
  Endpoint endpoint;
  if (!Endpoint::Decode(std::string(bytes), 0, &endpoint).ok()) return;
  Endpoint again;
  Check(Endpoint::Decode(endpoint.Encode(), 0, &again).ok(),
        "an endpoint that cannot be read again");
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
  Handshake shake = server ? Handshake::Server(Heard(bytes), secret)
                           : Handshake::Client(Heard(bytes), secret, {1, 0, Purpose::kData});
  for (int step = 0; step < 8; ++step) {
    if (!shake.Step().ok()) return;
    Check(shake.state() != Handshake::State::kDone, "a stranger that was let in");
  }
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

 private:
  std::string_view bytes_;
};

class Silent : public Link {
 public:
  int fd() const override { return -1; }
  bool Left(Departure*) override { return false; }
  void Leave(const Departure&) override {}
};

Request Own(const std::string& name) {
  Request request;
  request.name = name;
  request.entries.push_back({DType::kFloat32, {8, 4}});
  return request;
}

void Negotiate(std::string_view bytes) {
  World world;
  world.topology = MakeTopology(0, {"a", "b"}, {"a", "b"});
  Check(Poller::Create(true, &world.idle).ok() && Poller::Create(false, &world.driver).ok(),
        "no pollers");
  Geometry geometry;
  geometry.staging_bytes = kPage;
  geometry.heap_bytes = kPage;
  Check(Arena::Create(geometry, true, world.idle.bell(), world.driver.bell(), &world.arena).ok(),
        "no arena");
  world.peers.resize(2);
  world.peers[1].channel = std::make_unique<Script>(bytes);
  world.peers[1].link = std::make_unique<Silent>();
  Config config;
  config.log_level = "error";
  config.spin_us = 0;
  config.collective_timeout = 1;
  Communicator comm(&world, config, [] { return Result::Ok(); });
  Negotiator negotiator(&comm, 4);
  for (int cycle = 0; cycle < 6; ++cycle) {
    bool began = false;
    if (!negotiator.PeerBegan(&began).ok()) return;
    std::vector<std::shared_ptr<Operation>> fresh;
    if (cycle % 2 == 0) {
      fresh.push_back(std::make_shared<Operation>());
      fresh[0]->request = Own("x" + std::to_string(cycle));
    }
    Negotiator::Outcome outcome;
    if (!negotiator.Cycle(std::move(fresh), false, &outcome).ok()) return;
    (void)negotiator.Missing(NowNs(), false, 0);
    (void)negotiator.Awaited();
  }
}

std::string Cycles() {
  std::string bytes;
  for (uint64_t cycle = 1; cycle <= 4; ++cycle) {
    // The header of a round, as dissemination.cc has it: magic, kind, round, flags, cycle.
    Writer header;
    header.Put<uint32_t>(0x63797631);
    header.Put<uint8_t>(2);
    header.Put<uint8_t>(0);
    header.Put<uint16_t>(cycle == 4 ? 0 : 2);
    header.Put<uint64_t>(cycle);
    // From the second cycle on one word of cache bits: none of ours is agreed on anew.
    if (cycle > 1) header.Put<uint64_t>(0);
    bytes += header.bytes();
    if (cycle == 4) break;
    Writer list;
    list.Put<uint32_t>(2);
    Encode(Own("x" + std::to_string(cycle - 1)), &list);
    Encode(Own("y" + std::to_string(cycle)), &list);
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
    Request request = Own("layer." + std::to_string(c));
    request.collective = static_cast<Collective>(c);
    request.entries.push_back({DType::kBFloat16, {1, 2, 3}, 4096});
    request.splits = {5, 3};
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
  add(kClient, "SPARKVD1" + std::string(32, '\2') + std::string(32, '\3'));
  Writer goodbye;
  goodbye.Put<uint8_t>(0);
  goodbye.Put<uint8_t>(1);
  goodbye.Put<uint8_t>(3);
  goodbye.PutString("rank 1 raised KeyError");
  add(kGoodbye, goodbye.bytes());
  add(kCycle, Cycles());
  return seeds;
}

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
    default:
      Negotiate(bytes);
  }
  return 0;
}
