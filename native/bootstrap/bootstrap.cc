#include "native/bootstrap/bootstrap.h"

#include <fcntl.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <map>

#include "native/base/clock.h"
#include "native/bootstrap/arena_size.h"
#include "native/bootstrap/connector.h"
#include "native/bootstrap/handshake.h"
#include "native/transport/inproc/inproc.h"
#include "native/transport/interfaces.h"
#include "native/transport/shm/shm.h"
#include "native/transport/socket.h"
#include "native/transport/tcp/tcp_channel.h"

namespace sparkvod {
namespace {

constexpr int kInterruptMs = 50;  // how often a wait looks whether it is interrupted
// For so long a rank that cannot go on waits for the others, to tell them why.
constexpr double kFarewellSeconds = 0.5;

std::string Hex(const std::string& bytes) {
  std::string text;
  for (const unsigned char c : bytes) {
    text += "0123456789abcdef"[c >> 4];
    text += "0123456789abcdef"[c & 15];
  }
  return text;
}

std::string Text(uint64_t number) { return std::to_string(number); }

// With all its digits, so that two numbers have one text only when they are one.
std::string Text(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%.17g", number);
  return text;
}

// Whether two ranks exchange bytes through shared memory.
bool Shares(const Endpoint& a, const Endpoint& b) {
  return a.host_id == b.host_id && a.transport != "tcp";
}

Result CheckAgreement(int rank, const std::vector<Endpoint>& endpoints) {
  for (size_t r = 0; r < endpoints.size(); ++r) {
    const Endpoint& a = endpoints[static_cast<size_t>(rank)];
    const Endpoint& b = endpoints[r];
    if (a.transport != b.transport)
      return Result::Fail(Code::kInvalid,
                          "rank " + std::to_string(rank) + " has transport '" + a.transport +
                              "', rank " + std::to_string(r) + " on " + b.host + " has '" +
                              b.transport + "'; set SPARKVOD_TRANSPORT to one value on all ranks");
    if (a.transport == "shm" && a.host_id != b.host_id)
      return Result::Fail(Code::kInvalid, "transport 'shm' was asked for, but rank " +
                                              std::to_string(r) + " runs on another host, " +
                                              b.host + "; leave SPARKVOD_TRANSPORT at 'auto'");
    // What every rank decides for itself from these must come out the same everywhere.
    const struct {
      const char* knob;
      std::string own, other;
    } shared[] = {{"SPARKVOD_STAGING_BYTES", Text(a.staging_bytes), Text(b.staging_bytes)},
                  {"SPARKVOD_FUSION_THRESHOLD", Text(a.fusion_threshold), Text(b.fusion_threshold)},
                  {"SPARKVOD_ONE_SHOT_BYTES", Text(a.one_shot_bytes), Text(b.one_shot_bytes)},
                  {"SPARKVOD_CACHE_CAPACITY", Text(a.cache_capacity), Text(b.cache_capacity)},
                  {"SPARKVOD_TCP_STREAMS", Text(a.tcp_streams), Text(b.tcp_streams)},
                  {"SPARKVOD_ALLREDUCE_ALGORITHM", a.allreduce_algorithm, b.allreduce_algorithm},
                  {"SPARKVOD_BROADCAST_ALGORITHM", a.broadcast_algorithm, b.broadcast_algorithm},
                  {"SPARKVOD_LINK_GBITS", Text(a.link_gbits), Text(b.link_gbits)},
                  {"SPARKVOD_TLS", a.tls ? "1" : "0", b.tls ? "1" : "0"}};
    for (const auto& s : shared)
      if (s.own != s.other)
        return Result::Fail(Code::kInvalid, std::string(s.knob) + " is " + s.own + " on rank " +
                                                std::to_string(rank) + " and " + s.other +
                                                " on rank " + std::to_string(r) +
                                                "; set one value on all ranks");
  }
  return {};
}

// Hosts on which a rank cannot share memory use TCP, whatever the others of it could do: the ranks
// of a host share all or nothing. Ranks that are threads of one process need no shared memory.
Result FallBack(int rank, const Logger& log, std::vector<Endpoint>* endpoints) {
  const Endpoint own = (*endpoints)[static_cast<size_t>(rank)];
  std::map<std::string, int> unable;           // host -> its first rank that cannot
  std::map<std::string, std::string> process;  // host -> of its first rank
  std::map<std::string, int> first;            // host -> its first rank
  std::map<std::string, bool> several;         // host -> whether its ranks are several processes
  for (size_t r = 0; r < endpoints->size(); ++r) {
    const Endpoint& e = (*endpoints)[r];
    first.emplace(e.host_id, static_cast<int>(r));
    if (!e.not_shared.empty()) unable.emplace(e.host_id, static_cast<int>(r));
    if (process.emplace(e.host_id, e.process).first->second != e.process) several[e.host_id] = true;
  }
  for (const auto& [host, r] : unable) {
    if (!several[host]) continue;
    const Endpoint& e = (*endpoints)[static_cast<size_t>(r)];
    const std::string why = "rank " + std::to_string(r) + " on " + e.host +
                            " can share no memory (" + e.not_shared + ")";
    if (e.transport == "tcp") continue;
    if (e.transport == "shm")
      return Result::Fail(Code::kInvalid, why +
                                              ", but transport 'shm' was asked for; leave "
                                              "SPARKVOD_TRANSPORT at 'auto' to use TCP");
    if (host == own.host_id && first[host] == rank)
      log.Warning(why + ": the ranks of this host exchange bytes over TCP, which is slower");
  }
  for (Endpoint& e : *endpoints)
    if (unable.count(e.host_id) != 0 && several[e.host_id]) e.transport = "tcp";
  return {};
}

// Waits until a local rank has handed over, or left; it does so only when it has met all of its
// own peers.
Result AwaitArena(int socket, const Deadline& deadline, const std::function<bool()>& interrupted) {
  pollfd p{socket, POLLIN, 0};
  while (!deadline.Passed()) {
    if (interrupted && interrupted())
      return Result::Fail(Code::kShutDown, "interrupted while connecting");
    if (::poll(&p, 1, deadline.LeftMs(kInterruptMs)) > 0) break;
  }
  return {};
}

}  // namespace

Topology MakeTopology(int rank, const std::vector<std::string>& host_ids,
                      const std::vector<std::string>& hosts) {
  Topology t;
  t.rank = rank;
  t.size = static_cast<int>(host_ids.size());
  t.hosts = hosts;
  t.host_ids = host_ids;
  std::map<std::string, std::vector<int>> by_host;
  std::vector<std::string> order;  // hosts by their first rank
  for (int r = 0; r < t.size; ++r) {
    auto& ranks = by_host[host_ids[static_cast<size_t>(r)]];
    if (ranks.empty()) order.push_back(host_ids[static_cast<size_t>(r)]);
    ranks.push_back(r);
  }
  const std::string& own = host_ids[static_cast<size_t>(rank)];
  t.local_ranks = by_host[own];
  t.local_size = static_cast<int>(t.local_ranks.size());
  t.local_rank = static_cast<int>(std::find(t.local_ranks.begin(), t.local_ranks.end(), rank) -
                                  t.local_ranks.begin());
  t.cross_size = 0;
  for (const std::string& host : order) {
    const int local_size = static_cast<int>(by_host[host].size());
    if (local_size != t.local_size) t.homogeneous = false;
    if (local_size <= t.local_rank) continue;
    t.cross_ranks.push_back(by_host[host][static_cast<size_t>(t.local_rank)]);
    if (host == own) t.cross_rank = t.cross_size;
    ++t.cross_size;
  }
  return t;
}

Result Bootstrap::Listen(const Config& config, std::unique_ptr<Bootstrap>* out,
                         std::string* endpoint) {
  if (config.tls) SPARKVOD_TRY(TlsSession::Prepare());
  auto b = std::make_unique<Bootstrap>();
  b->config_ = config;
  b->own_ = Endpoint::OfThisProcess(config);
  Geometry geometry;
  geometry.staging_bytes = static_cast<size_t>(b->own_.staging_bytes);
  geometry.heap_bytes = static_cast<size_t>(b->own_.arena_bytes);
  const Result shared = Arena::Probe(&geometry);
  b->own_.arena_bytes = geometry.heap_bytes;
  // Without a descriptor for it there is none for TCP either.
  if (shared.out_of_descriptors()) return shared;
  if (!shared.ok()) b->own_.not_shared = shared.Report();
  std::string address;
  SPARKVOD_TRY(OwnAddress(config.address, &address));
  SPARKVOD_TRY(ListenTcp(address, config.port_range, &b->tcp_, &b->own_.port));
  b->own_.addresses = address.empty() ? LocalAddresses() : std::vector<std::string>{address};
  b->own_.unix_name = "sparkvod." + Hex(RandomBytes(16));
  SPARKVOD_TRY(ListenUnix(b->own_.unix_name, &b->unix_));
  b->spare_ = Fd(::fcntl(b->unix_.get(), F_DUPFD_CLOEXEC, 0));
  if (!b->spare_.valid()) return Result::Errno("no descriptor can be kept in reserve", errno);
  b->place_ = std::make_unique<inproc::Place>(b->own_.unix_name);
  *endpoint = b->own_.Encode();
  *out = std::move(b);
  return {};
}

Result Bootstrap::Connect(int rank, const std::vector<std::string>& encoded,
                          const std::string& secret, const std::function<bool()>& interrupted,
                          std::unique_ptr<World>* out) {
  const int size = static_cast<int>(encoded.size());
  if (rank < 0 || rank >= size)
    return Result::Fail(Code::kInvalid, "rank " + std::to_string(rank) + " was given with " +
                                            std::to_string(size) + " endpoints; a rank from 0 to " +
                                            std::to_string(size - 1) + " was expected");
  std::vector<Endpoint> endpoints(encoded.size());
  for (int r = 0; r < size; ++r)
    SPARKVOD_TRY(
        Endpoint::Decode(encoded[static_cast<size_t>(r)], r, &endpoints[static_cast<size_t>(r)]));
  if (endpoints[static_cast<size_t>(rank)].unix_name != own_.unix_name)
    return Result::Fail(Code::kInvalid,
                        "endpoint " + std::to_string(rank) +
                            " of the list is not this rank's own; endpoints must be in rank order");
  SPARKVOD_TRY(CheckAgreement(rank, endpoints));
  const Logger log(config_.log_level, "rank " + std::to_string(rank));
  RefuseLargeArenas(&endpoints);
  SPARKVOD_TRY(FallBack(rank, log, &endpoints));
  FitArenas(&endpoints);
  own_ = endpoints[static_cast<size_t>(rank)];

  Parts parts;
  std::vector<std::string> ids, hosts;
  for (const Endpoint& e : endpoints) {
    ids.push_back(e.host_id);
    hosts.push_back(e.host);
  }
  parts.world->topology = MakeTopology(rank, ids, hosts);
  parts.world->peers.resize(encoded.size());
  const std::string key = WorldKey(secret, encoded);
  Connector connector(rank, endpoints, key, log);
  const Result joined = Assemble(&connector, endpoints, key, log, interrupted, &parts);
  spare_.Close();
  if (!joined.ok()) return Leave(&connector, joined, &parts);
  parts.world->place = std::move(place_);
  *out = std::move(parts.world);
  return {};
}

Result Bootstrap::Assemble(Connector* connector, const std::vector<Endpoint>& endpoints,
                           const std::string& key, const Logger& log,
                           const std::function<bool()>& interrupted, Parts* parts) {
  World* const world = parts->world.get();
  const Topology& topology = world->topology;
  const int rank = topology.rank, size = topology.size;
  const auto is_in_process = [&](int r) {
    return endpoints[static_cast<size_t>(r)].process == own_.process;
  };
  const Deadline deadline = Deadline::After(config_.start_timeout);
  Geometry geometry;
  geometry.staging_bytes = static_cast<size_t>(own_.staging_bytes);
  geometry.heap_bytes = static_cast<size_t>(own_.arena_bytes);
  bool in_process = true;
  for (int r = 0; r < size; ++r) {
    if (r == rank) continue;
    const Endpoint& e = endpoints[static_cast<size_t>(r)];
    if (Shares(own_, e)) {
      // Threads meet without a socket: among n of them there would be n².
      if (!is_in_process(r)) connector->Want(r, Purpose::kShared);
      in_process = in_process && is_in_process(r);
      // The smallest heap of a host's ranks serves all, so that geometries agree.
      geometry.heap_bytes = std::min(geometry.heap_bytes, static_cast<size_t>(e.arena_bytes));
    } else {
      for (int s = 0; s < config_.tcp_streams; ++s) connector->Want(r, DataStream(s));
      connector->Want(r, Purpose::kLink);
    }
  }
  const bool sharing = Shares(own_, own_) && topology.local_size > 1;
  geometry.local_size = sharing ? topology.local_size : 1;
  SPARKVOD_TRY(Poller::Create(true, &world->idle));
  SPARKVOD_TRY(Poller::Create(false, &world->driver));
  SPARKVOD_TRY(connector->Run({tcp_.get(), unix_.get()}, deadline, interrupted));
  tcp_.Close();
  unix_.Close();
  if (own_.tls)
    log.Info("TCP connections to other ranks are encrypted: TLS 1.3, " + TlsSession::Version());

  SPARKVOD_TRY(
      Arena::Create(geometry, in_process, world->idle.bell(), world->driver.bell(), &world->arena));
  std::map<int, Fd>& sockets = parts->sockets;
  std::vector<inproc::Sought> sought;
  for (const int r : topology.local_ranks) {
    if (!sharing || r == rank) continue;
    if (is_in_process(r)) {
      sought.push_back({endpoints[static_cast<size_t>(r)].unix_name, world->Name(r)});
      continue;
    }
    sockets[r] = connector->Take(r, Purpose::kShared).TakeSocket();
    SPARKVOD_TRY(shm::Offer(sockets[r].get(), world->arena));
    parts->offered.insert(r);
  }
  std::vector<std::shared_ptr<Arena>> of_threads;
  if (!sought.empty()) {
    // Threads of one process show the key itself to each other, in its own memory.
    place_->Offer(key, world->arena);
    const Result met = inproc::Await(sought, key, deadline, interrupted, &of_threads);
    if (!met.ok()) return met.code() == Code::kTimeout ? NotConnected(rank, met.Report()) : met;
  }
  auto next_of_threads = of_threads.begin();
  if (sharing) world->local_arenas.assign(static_cast<size_t>(topology.local_size), nullptr);
  for (int local = 0; sharing && local < topology.local_size; ++local) {
    const int r = topology.local_ranks[static_cast<size_t>(local)];
    if (r == rank) {
      world->local_arenas[static_cast<size_t>(local)] = world->arena.get();
      continue;
    }
    Peer& peer = world->peers[static_cast<size_t>(r)];
    const bool same = is_in_process(r);
    if (same) {
      peer.arena = std::move(*next_of_threads++);
    } else {
      SPARKVOD_TRY(AwaitArena(sockets[r].get(), deadline, interrupted));
      SPARKVOD_TRY(
          shm::Receive(sockets[r].get(), world->Name(r), geometry, deadline.LeftMs(), &peer.arena));
    }
    peer.channel = std::make_unique<RingChannel>(same ? inproc::kName : shm::kName, world->arena,
                                                 topology.local_rank, peer.arena, local);
    peer.link =
        std::make_unique<ArenaLink>(world->arena, peer.arena, same ? Fd() : std::move(sockets[r]));
    world->local_arenas[static_cast<size_t>(local)] = peer.arena.get();
  }
  world->arena->CloseMemoryFd();
  for (int r = 0; r < size; ++r) {
    if (r == rank) continue;
    Peer& peer = world->peers[static_cast<size_t>(r)];
    if (peer.channel == nullptr) {
      std::vector<Stream> streams;
      for (int s = 0; s < config_.tcp_streams; ++s)
        streams.push_back(connector->Take(r, DataStream(s)));
      auto channel = std::make_unique<TcpChannel>(std::move(streams));
      for (const Stream& stream : channel->connections()) {
        SPARKVOD_TRY(world->idle.Watch(stream.fd(), Poller::Kind::kIncoming));
        SPARKVOD_TRY(world->driver.Watch(stream.fd(), Poller::Kind::kStream));
      }
      peer.channel = std::move(channel);
      peer.link = connector->TakeLink(r);
      // Not the streams: their bytes under way keep probes off, and to give up on bytes that are
      // not taken (TCP_USER_TIMEOUT) would be to give up on ranks that are slow or stopped.
      KeepAlive(peer.link->fd(), config_.host_timeout);
    }
    if (peer.link->fd() >= 0) {
      SPARKVOD_TRY(world->idle.Watch(peer.link->fd(), Poller::Kind::kNews));
      SPARKVOD_TRY(world->driver.Watch(peer.link->fd(), Poller::Kind::kNews));
    }
  }
  return {};
}

Result Bootstrap::Leave(Connector* connector, const Result& cause, Parts* parts) {
  World& world = *parts->world;
  const Code code = cause.code();
  Departure how;
  how.relayed = code == Code::kPeerLost || code == Code::kTimeout;
  if (code == Code::kTimeout || code == Code::kInvalid) how.code = code;
  how.cause = cause.Report();
  // Before anything is closed, so that nobody finds it closed without a reason.
  if (!parts->offered.empty()) ArenaLink::Tell(how, &world.arena->header());
  for (Peer& peer : world.peers)
    if (peer.link != nullptr) peer.link->Leave(how);
  for (const auto& [r, socket] : parts->sockets)
    if (socket.valid() && parts->offered.count(r) == 0) shm::Refuse(socket.get(), how);
  const std::string name = world.Name(world.topology.rank);
  parts->sockets.clear();
  parts->world.reset();
  // Who is interrupted leaves at once, and who has waited in vain does not wait for anybody more.
  const bool waits = code == Code::kSystem || code == Code::kPeerLost;
  std::vector<int> listeners;
  for (const Fd* listener : {&tcp_, &unix_})
    if (listener->valid()) listeners.push_back(listener->get());
  connector->Leave(listeners, how, waits ? kFarewellSeconds : 0);
  if (code != Code::kTimeout) {
    // Who waits in vain like this one should say so itself, and not that this one has left.
    tcp_.Close();
    unix_.Close();
    place_.reset();
  }
  if (code != Code::kSystem) return cause;
  return Result::Fail(code, name + " could not connect to the others", cause);
}

}  // namespace sparkvod
