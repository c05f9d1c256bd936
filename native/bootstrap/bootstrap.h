// Endpoints in, a World out.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "native/base/config.h"
#include "native/base/log.h"
#include "native/base/result.h"
#include "native/bootstrap/connector.h"
#include "native/bootstrap/endpoint.h"
#include "native/bootstrap/world.h"

namespace sparkvod {

class Bootstrap {
 public:
  // Opens the listeners. `endpoint` is what every other rank must be given.
  static Result Listen(const Config& config, std::unique_ptr<Bootstrap>* out,
                       std::string* endpoint);

  // Connects to every rank and closes the listeners. Ranks connect to the lower ones and accept the
  // higher ones; whoever cannot prove the secret is dropped and logged, and does not disturb.
  // `interrupted` is asked a few times a second. When it fails, the others are told why.
  Result Connect(int rank, const std::vector<std::string>& endpoints, const std::string& secret,
                 const std::function<bool()>& interrupted, std::unique_ptr<World>* out);
  // Whether it may be tried: not after a try that the others have heard of.
  bool listening() const { return place_ != nullptr; }

 private:
  // What has come together of a world when it fails.
  struct Parts {
    std::unique_ptr<World> world = std::make_unique<World>();
    std::map<int, Fd> sockets;  // by rank, of those whose memory is yet to come
    std::set<int> offered;      // ranks that were given this one's
  };
  Result Assemble(Connector* connector, const std::vector<Endpoint>& endpoints,
                  const std::string& key, const Logger& log,
                  const std::function<bool()>& interrupted, Parts* parts);
  // The error of a rank that cannot go on, of which it tells those that wait for it.
  Result Leave(Connector* connector, const Result& cause, Parts* parts);

  Config config_;
  Endpoint own_;
  Fd tcp_, unix_;
  Fd spare_;  // kept so that who runs out of descriptors can still tell the others
  std::unique_ptr<inproc::Place> place_;  // the world's, once it has come together
};

}  // namespace sparkvod
