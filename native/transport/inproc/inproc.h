// Ranks that are threads of one process: they share each other's arenas by pointer, and meet
// without a connection.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "native/base/clock.h"
#include "native/transport/shared/ring_channel.h"

namespace sparkvod::inproc {

constexpr const char* kName = "inproc";

// Where the other ranks of this process find one rank, under a name that no other has: from when it
// listens until its engine goes.
class Place {
 public:
  explicit Place(std::string name);
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  // Shows the arena to whoever comes with the same proof of what world it is in. Only weakly, so
  // that who gives up takes its arena along.
  void Offer(const std::string& world, const std::shared_ptr<Arena>& arena);

 private:
  const std::string name_;
};

// A rank that is waited for: the name of its place, and what messages call it.
struct Sought {
  std::string place, rank;
};

// Waits until all that are sought have offered their arenas to this world, and yields them in this
// order. kPeerLost when one has left; kTimeout at the deadline, and then the words say which ranks
// are missing and why; kShutDown when `interrupted`, which is asked a few times a second, says so.
Result Await(const std::vector<Sought>& sought, const std::string& world, const Deadline& deadline,
             const std::function<bool()>& interrupted, std::vector<std::shared_ptr<Arena>>* out);

}  // namespace sparkvod::inproc
