// The loop that makes all connections of one rank, outgoing and incoming, at the same time.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "native/base/clock.h"
#include "native/base/log.h"
#include "native/base/result.h"
#include "native/bootstrap/endpoint.h"
#include "native/bootstrap/handshake.h"

namespace sparkvod {

// What a connect ends with whose deadline has passed; `missing` says who, and why.
Result NotConnected(int rank, const std::string& missing);

class Connector {
 public:
  Connector(int rank, const std::vector<Endpoint>& endpoints, const std::string& secret,
            const Logger& log)
      : rank_(rank), endpoints_(endpoints), secret_(secret), log_(log) {}

  // Wants the connection `purpose` with `peer`.
  void Want(int peer, Purpose purpose) { wanted_[{peer, purpose}]; }
  // Runs until every wanted connection is authenticated, or says which is missing and why.
  Result Run(const std::vector<int>& listeners, const Deadline& deadline,
             const std::function<bool()>& interrupted);
  Stream Take(int peer, Purpose purpose) { return std::move(made_.at({peer, purpose})); }

 private:
  using Key = std::pair<int, Purpose>;
  struct Attempt {
    size_t next_address = 0;
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
  };

  bool encrypts() const { return endpoints_[static_cast<size_t>(rank_)].tls; }
  void StartAttempts();
  Result StartOne(const Key& key, Attempt* attempt, Fd* fd);
  void AcceptAll(int listener);
  void Retry(const Key& key, const std::string& why);
  // The attempt that an incoming connection answers; null when nobody waits for it.
  Attempt* Wanted(const Hello& hello);
  // True when the handshake has ended, well or badly.
  bool Advance(Shaking* shaking);
  std::string Missing() const;

  int rank_;
  const std::vector<Endpoint>& endpoints_;
  const std::string& secret_;
  const Logger& log_;
  std::map<Key, Attempt> wanted_;
  std::map<Key, Stream> made_;
  std::vector<Connecting> connecting_;
  std::vector<Shaking> shaking_;
};

}  // namespace sparkvod
