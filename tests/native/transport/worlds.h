// Connected worlds without an engine, on every transport that there is. A new transport is one more
// line in Transports().
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "native/bootstrap/bootstrap.h"
#include "tests/native/check.h"
#include "tests/native/ranks.h"

namespace sparkvod::check {

struct Transport {
  const char* name;
  const char* knob;   // Config::transport
  bool by_processes;  // its ranks cannot be threads of one process
  bool tls = false;   // Config::tls
};

inline std::vector<Transport> Transports() {
  std::vector<Transport> all = {{"inproc", "auto", false}, {"tcp", "tcp", false}};
  if (check::CanEncrypt()) all.push_back({"tls", "tcp", false, true});
  if (check::CanFork()) all.push_back({"shm", "shm", true});
  return all;
}

inline Config ConfigOf(const Transport& transport) {
  Config config;
  config.transport = transport.knob;
  config.tls = transport.tls;
  config.address = "127.0.0.1";
  config.start_timeout = 30;
  config.staging_bytes = 1 << 16;
  config.arena_bytes = 1 << 20;
  return config;
}

inline std::unique_ptr<World> Join(const Config& config, int rank, Board& board) {
  std::unique_ptr<Bootstrap> bootstrap;
  std::string endpoint;
  std::unique_ptr<World> world;
  Result result = Bootstrap::Listen(config, &bootstrap, &endpoint);
  const std::vector<std::string> endpoints = board.Gather(rank, endpoint);
  if (result.ok()) result = bootstrap->Connect(rank, endpoints, "secret", nullptr, &world);
  EXPECT_EQ(result.Report(), "ok");
  return world;
}

// Runs the body in every transport's world of `size` ranks. The ranks part only when all have
// ended.
inline void ForEachTransport(
    int size,
    const std::function<void(World& world, const Transport& transport, Board& board)>& body,
    const std::vector<int>& killed = {}) {
  for (const Transport& transport : Transports()) {
    const auto rank_body = [&](int rank, Board& board) {
      const std::unique_ptr<World> world = Join(ConfigOf(transport), rank, board);
      board.Barrier(rank);  // who leaves at once would be missed by those that still connect
      if (world == nullptr) return;
      body(*world, transport, board);
      if (killed.empty()) board.Barrier(rank);
    };
    if (transport.by_processes)
      check::RunProcesses(size, rank_body, killed);
    else if (killed.empty())
      check::RunThreads(size, rank_body);
  }
}

}  // namespace sparkvod::check
