#include "native/transport/interfaces.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdlib>

namespace sparkvod {
namespace {

// The bytes of an address, 4 or 16 of them; none if it is no address.
std::vector<uint8_t> Bytes(const std::string& address) {
  std::vector<uint8_t> bytes(sizeof(in6_addr));
  if (::inet_pton(AF_INET6, address.c_str(), bytes.data()) == 1) return bytes;
  bytes.resize(sizeof(in_addr));
  if (::inet_pton(AF_INET, address.c_str(), bytes.data()) == 1) return bytes;
  return {};
}

bool InNetwork(const std::vector<uint8_t>& address, const std::vector<uint8_t>& network, int bits) {
  if (address.size() != network.size()) return false;
  for (size_t i = 0; bits > 0; ++i, bits -= 8) {
    const int shift = bits < 8 ? 8 - bits : 0;
    if ((address[i] ^ network[i]) >> shift != 0) return false;
  }
  return true;
}

Result ParseNetwork(const std::string& text, std::vector<uint8_t>* network, int* bits) {
  const size_t slash = text.find('/');
  char* end = nullptr;
  *network = Bytes(text.substr(0, slash));
  const long n = std::strtol(text.c_str() + slash + 1, &end, 10);
  if (network->empty() || end == text.c_str() + slash + 1 || *end != 0 || n < 0 ||
      n > static_cast<long>(8 * network->size()))
    return Result::Fail(Code::kInvalid, "SPARKVOD_ADDRESS='" + text +
                                            "' was found, a network such as 10.0.0.0/8 or "
                                            "fd00::/16 was expected");
  *bits = static_cast<int>(n);
  return {};
}

std::string Found(const std::vector<Interface>& interfaces) {
  std::string text;
  for (const Interface& i : interfaces)
    text += (text.empty() ? "" : ", ") + i.name + " with " + i.address;
  return text.empty() ? "none" : text;
}

}  // namespace

std::vector<Interface> Interfaces() {
  std::vector<Interface> found;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return found;
  for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || (i->ifa_flags & IFF_UP) == 0) continue;
    const int family = i->ifa_addr->sa_family;
    char text[INET6_ADDRSTRLEN] = {};
    if (family == AF_INET) {
      ::inet_ntop(family, &reinterpret_cast<sockaddr_in*>(i->ifa_addr)->sin_addr, text,
                  sizeof text);
    } else if (family == AF_INET6) {
      const auto& a = reinterpret_cast<sockaddr_in6*>(i->ifa_addr)->sin6_addr;
      if (IN6_IS_ADDR_LINKLOCAL(&a)) continue;
      ::inet_ntop(family, &a, text, sizeof text);
    } else {
      continue;
    }
    found.push_back({i->ifa_name, text, family == AF_INET6, (i->ifa_flags & IFF_LOOPBACK) != 0});
  }
  ::freeifaddrs(list);
  return found;
}

std::vector<std::string> LocalAddresses() {
  std::vector<std::string> others, loopback;
  for (const Interface& i : Interfaces()) (i.loopback ? loopback : others).push_back(i.address);
  others.insert(others.end(), loopback.begin(), loopback.end());
  if (others.empty()) others.emplace_back("127.0.0.1");
  return others;
}

Result OwnAddress(const std::string& wanted, std::string* address) {
  *address = wanted;
  if (wanted.empty() || !Bytes(wanted).empty()) return {};
  const bool network = wanted.find('/') != std::string::npos;
  std::vector<uint8_t> prefix;
  int bits = 0;
  if (network) SPARKVOD_TRY(ParseNetwork(wanted, &prefix, &bits));
  const std::vector<Interface> interfaces = Interfaces();
  const Interface* best = nullptr;
  for (const Interface& i : interfaces) {
    const bool fits = network ? InNetwork(Bytes(i.address), prefix, bits) : i.name == wanted;
    if (fits && (best == nullptr || (best->ipv6 && !i.ipv6))) best = &i;
  }
  if (best != nullptr) {
    *address = best->address;
    return {};
  }
  // An interface that is down, or has no address, must not be looked up as the name of a host.
  if (network || ::if_nametoindex(wanted.c_str()) != 0)
    return Result::Fail(Code::kInvalid,
                        "SPARKVOD_ADDRESS='" + wanted +
                            "' was found, but this host has no address " +
                            (network ? "in that network" : "on that interface, or it is down") +
                            "; its interfaces are " + Found(interfaces));
  return {};
}

}  // namespace sparkvod
