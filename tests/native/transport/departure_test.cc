// How a peer's last words are read: whole, in pieces, and those that are none.
#include "native/transport/departure.h"

#include <sys/socket.h>

#include <memory>
#include <string>

#include "native/transport/tcp/tcp_channel.h"
#include "tests/native/check.h"

namespace sparkvod {
namespace {

struct Ends {
  Ends() {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
    far = Fd(fds[0]);
    link = std::make_unique<TcpLink>(Stream(Fd(fds[1])));
  }
  void Say(const std::string& words) {
    EXPECT_EQ(::send(far.get(), words.data(), words.size(), 0), static_cast<ssize_t>(words.size()));
  }
  Fd far;
  std::unique_ptr<TcpLink> link;
};

TEST(DepartureMayComeInPieces) {
  Departure said;
  said.relayed = true;
  said.code = Code::kTimeout;
  said.cause = std::string(900, 'x') + " ran out of descriptors";
  const std::string words = Encode(said);
  for (const size_t cut : {size_t{1}, size_t{3}, size_t{6}, size_t{500}, words.size() - 1}) {
    Ends ends;
    Departure heard;
    EXPECT(!ends.link->Left(&heard));
    ends.Say(words.substr(0, cut));
    EXPECT(!ends.link->Left(&heard));
    ends.Say(words.substr(cut));
    EXPECT(ends.link->Left(&heard));
    EXPECT_EQ(heard.cause, said.cause);
    EXPECT(heard.relayed && !heard.orderly && heard.code == Code::kTimeout);
  }
}

TEST(DepartureThatBreaksOffIsOne) {
  const std::string words = Encode({false, false, Code::kPeerLost, "because"});
  for (const size_t cut : {size_t{2}, words.size() - 1}) {
    Ends ends;
    Departure heard;
    ends.Say(words.substr(0, cut));
    ends.far.Close();
    EXPECT(ends.link->Left(&heard));
    EXPECT_EQ(heard.cause, "it left in the middle of a word");
  }
  Ends ends;
  Departure heard;
  ends.Say(std::string(100, '\xff'));  // a cause of 4 GB
  EXPECT(ends.link->Left(&heard));
  EXPECT_EQ(heard.cause, "it left in the middle of a word");
}

}  // namespace
}  // namespace sparkvod
