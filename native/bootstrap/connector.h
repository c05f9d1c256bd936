// The loop that makes all connections of one rank, outgoing and incoming, at the same time.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "native/base/clock.h"
#include "native/base/log.h"
#include "native/base/result.h"
#include "native/bootstrap/endpoint.h"
#include "native/bootstrap/handshake.h"
#include "native/transport/tcp/tcp_channel.h"

namespace sparkvod {

// What a connect ends with whose deadline has passed; `missing` says who, and why.
Result NotConnected(int rank, const std::string& missing);

class Connector {
 public:
  Connector(int rank, const std::vector<Endpoint>& endpoints, const std::string& key,
            const Logger& log)
      : rank_(rank), endpoints_(endpoints), key_(key), log_(log) {}

  // Wants the connection `purpose` with `peer`.
  void Want(int peer, Purpose purpose) { wanted_[{peer, purpose}]; }
  // Runs until every wanted connection is authenticated, or says which is missing and why. A rank
  // that is found to have left ends it.
  Result Run(const std::vector<int>& listeners, const Deadline& deadline,
             const std::function<bool()>& interrupted);
  Stream Take(int peer, Purpose purpose) { return std::move(made_.at({peer, purpose})); }
  std::unique_ptr<Link> TakeLink(int peer) { return std::move(links_.at(peer)); }

  // Tells all that wait for this rank why it leaves: at once those whose connections are made and
  // were not taken, and the others as they come, for at most `seconds`.
  void Leave(const std::vector<int>& listeners, const Departure& how, double seconds);

 private:
  using Key = std::pair<int, Purpose>;
  struct Attempt {
    size_t next_address = 0;
    int silent = 0;  // looks in a row at which the peer did not listen
    int64_t not_before_ns = 0;
    bool running = false;
    std::string last_error = "it has not connected";
  };
  struct Connecting {
    Key key;
    Fd fd;
    Deadline deadline;
  };
  struct Shaking {
    Handshake handshake;
    Key key;  // of an outgoing one; {-1, ...} when incoming
    Deadline deadline;
    int64_t began_ns;
  };

  bool encrypts() const { return own().tls; }
  const Endpoint& own() const { return endpoints_[static_cast<size_t>(rank_)]; }
  std::string Name(int rank) const;
  // One wait for news, and what follows from them.
  Result Turn(const std::vector<int>& listeners, const Deadline& deadline);
  Result StartAttempts();
  Result StartOne(const Key& key, Attempt* attempt, Fd* fd);
  Result AcceptAll(int listener);
  void Retry(const Key& key, const Result& why);
  void Keep(const Key& key, Stream stream);
  // Whether there may be a descriptor again soon when there is none: when somebody is there who has
  // proved nothing yet. Who does not for long must go.
  bool MayGetRoom();
  // The attempt that an incoming connection answers; null when nobody waits for it.
  Attempt* Wanted(const Hello& hello);
  // True when the handshake has ended, well or badly.
  bool Advance(Shaking* shaking);
  // The error when a rank that is connected has left.
  Result HearPeers();
  // The error when a rank of this host listens no more.
  Result CheckListeners();
  std::string Missing() const;

  int rank_;
  const std::vector<Endpoint>& endpoints_;
  const std::string& key_;  // the world's
  const Logger& log_;
  std::map<Key, Attempt> wanted_;
  std::map<Key, Stream> made_;  // those of links are empty here
  std::map<int, std::unique_ptr<TcpLink>> links_;
  std::set<int> offered_;  // ranks that have offered their shared memory
  std::vector<Connecting> connecting_;
  std::vector<Shaking> shaking_;
  std::string kernel_id_ = Endpoint::KernelId();
  int64_t look_at_ns_ = 0, full_until_ns_ = 0;
  bool leaving_ = false;
};

}  // namespace sparkvod
