// A cable between two network namespaces, with the delay and the rate of a long one: a TUN
// interface in each, and this loop between them. (tc's netem does the same where the kernel has
// it.)
//
// A packet leaves when those before it have left, at the rate, and arrives a delay later. What
// would wait longer than the switch has memory is dropped.
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "benchmarks/native/modes.h"
#include "native/base/clock.h"

namespace sparkvod::bench {
namespace {

// What the kernel tells before each packet (its own declaration, linux/virtio_net.h, is not C++).
struct PacketHeader {
  uint8_t flags, gso_type;
  uint16_t header_bytes, gso_size, checksum_start, checksum_offset;
};
static_assert(sizeof(PacketHeader) == 10);

// With that. One may be many that TCP has not cut yet, as it
// leaves that to network cards: so a packet costs this loop no more time than it takes on the
// cable.
constexpr size_t kLargestPacket = (64 << 10) + sizeof(PacketHeader);
constexpr size_t kHeaderBytes = 52;  // of IPv4 and TCP with time stamps
constexpr int64_t kSwitchBytes = 4 << 20;

struct Packet {
  int64_t due_ns;
  std::vector<char> bytes;
};

// One direction.
struct Lane {
  int from, to;
  int64_t free_ns = 0;  // when what was sent so far has left
  std::deque<Packet> under_way;
};

// Opens the end of the cable in a namespace.
int OpenEnd(const std::string& name, const std::string& interface) {
  const int space = ::open(("/run/netns/" + name).c_str(), O_RDONLY | O_CLOEXEC);
  if (space < 0 || ::setns(space, CLONE_NEWNET) != 0)
    Fail("cannot enter network namespace " + name + ": " + std::strerror(errno));
  ::close(space);
  const int end = ::open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  ifreq request{};
  request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
  std::snprintf(request.ifr_name, sizeof request.ifr_name, "%s", interface.c_str());
  if (end < 0 || ::ioctl(end, TUNSETIFF, &request) != 0)
    Fail("cannot make the interface " + interface + ": " + std::strerror(errno));
  ::ioctl(end, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4);
  return end;
}

// Bytes on the cable of what was read: every packet of it has headers.
double WireBytes(const char* buffer, size_t bytes) {
  PacketHeader header;
  std::memcpy(&header, buffer, sizeof header);
  const size_t whole = bytes - sizeof header;
  const size_t packets = header.gso_type == 0 || header.gso_size == 0 || whole <= kHeaderBytes
                             ? 1
                             : (whole - kHeaderBytes + header.gso_size - 1) / header.gso_size;
  return static_cast<double>(whole + (packets - 1) * kHeaderBytes);
}

void TakeIn(Lane* lane, int64_t delay_ns, double bytes_per_ns) {
  static char buffer[kLargestPacket];
  for (;;) {
    const ssize_t n = ::read(lane->from, buffer, sizeof buffer);
    if (n <= static_cast<ssize_t>(sizeof(PacketHeader))) return;
    const int64_t now = NowNs();
    const int64_t begins = std::max(now, lane->free_ns);
    if (static_cast<double>(begins - now) * bytes_per_ns > kSwitchBytes) continue;
    lane->free_ns =
        begins + static_cast<int64_t>(WireBytes(buffer, static_cast<size_t>(n)) / bytes_per_ns);
    lane->under_way.push_back({lane->free_ns + delay_ns, {buffer, buffer + n}});
  }
}

void HandOut(Lane* lane) {
  while (!lane->under_way.empty() && lane->under_way.front().due_ns <= NowNs()) {
    const std::vector<char>& bytes = lane->under_way.front().bytes;
    (void)!::write(lane->to, bytes.data(), bytes.size());  // an interface that is down loses it
    lane->under_way.pop_front();
  }
}

}  // namespace

void Cable(const std::vector<std::string>& namespaces, const std::string& interface,
           int64_t delay_us, int64_t megabits) {
  const int north = OpenEnd(namespaces[0], interface), south = OpenEnd(namespaces[1], interface);
  ::setpriority(PRIO_PROCESS, 0, -10);  // a cable does not wait for the ranks
  ::prctl(PR_SET_TIMERSLACK, 1UL);
  std::printf("ready\n");
  std::fflush(stdout);
  const double bytes_per_ns = static_cast<double>(megabits) / 8000;
  Lane lanes[2] = {{north, south, 0, {}}, {south, north, 0, {}}};
  for (;;) {
    for (Lane& lane : lanes) {
      TakeIn(&lane, delay_us * 1000, bytes_per_ns);
      HandOut(&lane);
    }
    int64_t wait = 1000000000;
    for (const Lane& lane : lanes)
      if (!lane.under_way.empty())
        wait = std::min(wait, std::max<int64_t>(0, lane.under_way.front().due_ns - NowNs()));
    pollfd ends[3] = {{north, POLLIN, 0}, {south, POLLIN, 0}, {STDIN_FILENO, 0, 0}};
    const timespec left{0, wait % 1000000000};
    ::ppoll(ends, 3, wait >= 1000000000 ? nullptr : &left, nullptr);
    if ((ends[2].revents & POLLHUP) != 0) return;  // who laid it is gone
  }
}

}  // namespace sparkvod::bench
