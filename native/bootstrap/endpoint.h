// What a rank tells the others about itself before they can talk: opaque bytes for whoever
// all-gathers them.
#pragma once

#include <string>
#include <vector>

#include "native/base/config.h"
#include "native/base/result.h"

namespace sparkvod {

struct Endpoint {
  std::string host;       // name for messages
  std::string host_id;    // equal for ranks that can share memory
  std::string process;    // equal for ranks of one process
  std::string transport;  // what this rank was configured for
  std::string allreduce_algorithm, broadcast_algorithm;
  std::string not_shared;  // why this process can share no memory; empty when it can
  std::string unix_name;   // abstract Unix socket
  std::vector<std::string> addresses;
  int port = 0;
  uint64_t staging_bytes = 0;
  uint64_t arena_bytes = 0;
  uint64_t address_space = 0;  // bytes that all arenas in this process may take
  uint64_t fusion_threshold = 0;
  uint64_t one_shot_bytes = 0;
  uint64_t cache_capacity = 0;
  uint64_t tcp_streams = 1;
  double link_gbits = 0;
  bool tls = false;

  std::string Encode() const;
  static Result Decode(const std::string& bytes, int rank, Endpoint* out);
  // What identifies the ranks that run under one kernel, for one user, and reach each other's Unix
  // sockets, where those of other users are dropped.
  static std::string KernelId();
  // Identifies this process on this host; reads the kernel's boot id and namespaces unless config
  // names a host.
  static Endpoint OfThisProcess(const Config& config);
};

}  // namespace sparkvod
