// How a peer left, and the words in which it says so.
#pragma once

#include <string>

#include "native/base/result.h"

namespace sparkvod {

struct Departure {
  bool orderly = false;  // it said good-bye after an agreed shutdown
  bool relayed = false;  // the cause is another rank's, and names it
  Code code = Code::kPeerLost;
  std::string cause;  // what it said, or what the kernel said
};

// Of a cause; what is longer is cut.
constexpr size_t kCauseLimit = 1024;

// As it travels over a connection that carries nothing else.
std::string Encode(const Departure& how);
// False while there is more to come. What can be no departure, as what breaks off when the
// connection has `ended`, is one that says so.
bool Decode(const std::string& heard, bool ended, Departure* how);

// The error of who meets ranks when one, called `who`, leaves.
Result LeftWhileConnecting(const std::string& who, const Departure& how);

}  // namespace sparkvod
