// What bootstrap yields: the authenticated peers of one rank, how they are grouped by host, and how
// to sleep until one of them has news. Owned by the engine; used by the holder of the driver token.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "native/transport/channel.h"
#include "native/transport/inproc/inproc.h"
#include "native/transport/poller.h"
#include "native/transport/shared/arena.h"

namespace sparkvod {

struct Topology {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;  // among the ranks of the same host, by rank
  int cross_rank = 0, cross_size = 1;  // among the ranks that have the same local rank, by host
  bool homogeneous = true;             // every host has the same number of ranks
  std::vector<std::string> hosts;      // name of each rank's host
  std::vector<std::string> host_ids;   // identity of each rank's host
  std::vector<int> local_ranks;        // global ranks on this host
  std::vector<int> cross_ranks;        // global ranks with this local rank, by host
};

// Groups ranks by the identity of their hosts.
Topology MakeTopology(int rank, const std::vector<std::string>& host_ids,
                      const std::vector<std::string>& hosts);

struct Peer {
  std::unique_ptr<Channel> channel;
  std::unique_ptr<Link> link;
  std::shared_ptr<Arena> arena;  // null when the peer shares no memory with this rank
};

struct World {
  Topology topology;
  std::vector<Peer> peers;               // by rank; the own entry is empty
  std::shared_ptr<Arena> arena;          // the own one
  std::unique_ptr<inproc::Place> place;  // where slower threads of this process find it
  std::vector<Arena*>
      local_arenas;  // by local rank, the own included; empty when the host's ranks share no memory
  Poller idle, driver;  // what the background thread and the driver sleep on

  // "rank 3 on host7", for messages.
  std::string Name(int rank) const {
    return "rank " + std::to_string(rank) + " on " + topology.hosts[static_cast<size_t>(rank)];
  }
};

}  // namespace sparkvod
