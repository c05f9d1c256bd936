// Endpoints in, a World out.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "native/base/config.h"
#include "native/base/log.h"
#include "native/base/result.h"
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
  // `interrupted` is asked a few times a second.
  Result Connect(int rank, const std::vector<std::string>& endpoints, const std::string& secret,
                 const std::function<bool()>& interrupted, std::unique_ptr<World>* out);

 private:
  Config config_;
  Endpoint own_;
  Fd tcp_, unix_;
  std::unique_ptr<inproc::Place> place_;  // the world's, once it has come together
};

}  // namespace sparkvod
