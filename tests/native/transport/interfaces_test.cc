#include "native/transport/interfaces.h"

#include "tests/native/check.h"

namespace sparkvod {
namespace {

std::string Own(const std::string& wanted) {
  std::string address;
  const Result result = OwnAddress(wanted, &address);
  return result.ok() ? address : result.Report();
}

TEST(InterfacesHaveTheLoopback) {
  bool found = false;
  for (const Interface& i : Interfaces())
    found = found || (i.name == "lo" && i.address == "127.0.0.1" && i.loopback && !i.ipv6);
  EXPECT(found);
  EXPECT(!LocalAddresses().empty());
}

TEST(InterfacesAreFoundByNameAndNetwork) {
  EXPECT(Own("lo") == "127.0.0.1");  // IPv4 before IPv6
  EXPECT(Own("127.0.0.0/8") == "127.0.0.1");
  EXPECT(Own("127.0.0.1/32") == "127.0.0.1");
  EXPECT(Own("126.0.0.0/7") == "127.0.0.1");
}

TEST(InterfacesLeaveAddressesAndNamesAsTheyAre) {
  for (const std::string same :
       {"", "127.0.0.1", "::1", "198.51.100.1", "localhost", "no.such.host"})
    EXPECT(Own(same) == same);
}

TEST(InterfacesSayWhatIsWrong) {
  EXPECT_CONTAINS(Own("198.51.100.0/24"), "this host has no address in that network");
  EXPECT_CONTAINS(Own("198.51.100.0/24"), "lo with 127.0.0.1");
  EXPECT_CONTAINS(Own("126.0.0.0/8"), "in that network");
  for (const char* wrong : {"127.0.0.0/33", "127.0.0.0/", "127.0.0.0/x", "lo/8", "fd00::/129"})
    EXPECT_CONTAINS(Own(wrong), "a network such as 10.0.0.0/8");
}

}  // namespace
}  // namespace sparkvod
