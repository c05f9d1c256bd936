// The addresses of this host, and which of them a rank shall listen on.
#pragma once

#include <string>
#include <vector>

#include "native/base/result.h"

namespace sparkvod {

struct Interface {
  std::string name;
  std::string address;
  bool ipv6 = false;
  bool loopback = false;
};

// Those that are up, one entry per address, without link-local ones, which mean nothing without a
// scope.
std::vector<Interface> Interfaces();
// Their addresses, loopback last.
std::vector<std::string> LocalAddresses();
// What the knob `address` names: an interface ("eth0") or a network ("10.0.0.0/8", "fd00::/16")
// becomes this host's first address there, IPv4 before IPv6; an address, the name of a host or
// nothing stays as it is.
Result OwnAddress(const std::string& wanted, std::string* address);

}  // namespace sparkvod
