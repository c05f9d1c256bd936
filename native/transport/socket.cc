#include "native/transport/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

namespace sparkvod {
namespace {

constexpr int kBacklog = 4096;
// What may be on its way at a time: enough for 1 Gbit/s over 30 ms.
constexpr int kBufferBytes = 4 << 20;

// Whether the kernel gives a socket such a buffer. To ask ends the kernel's own tuning of that
// socket, so where it grants less, as many do, it is not asked: what it tunes by itself is larger.
enum class Grants : int { kUnknown, kYes, kNo };
bool GrantsBuffer(int option, std::atomic<Grants>* known) {
  if (known->load() != Grants::kUnknown) return known->load() == Grants::kYes;
  const Fd probe(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!probe.valid()) return false;  // for want of a descriptor, say: who comes later asks again
  int granted = 0;
  socklen_t length = sizeof granted;
  // It says twice what was asked for, which is what it reckons with.
  const bool grants =
      ::setsockopt(probe.get(), SOL_SOCKET, option, &kBufferBytes, sizeof kBufferBytes) == 0 &&
      ::getsockopt(probe.get(), SOL_SOCKET, option, &granted, &length) == 0 &&
      granted / 2 >= kBufferBytes;
  known->store(grants ? Grants::kYes : Grants::kNo);
  return grants;
}

Result Resolve(const std::string& address, int port, sockaddr_storage* out, socklen_t* length) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  const int rc = ::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (rc == EAI_SYSTEM) return Result::Errno("address '" + address + "' cannot be resolved", errno);
  if (rc != 0 || found == nullptr)
    return Result::Fail(Code::kInvalid,
                        "address '" + address + "' cannot be resolved: " + ::gai_strerror(rc));
  std::memcpy(out, found->ai_addr, found->ai_addrlen);
  *length = found->ai_addrlen;
  ::freeaddrinfo(found);
  return {};
}

// Any address of both families; only IPv4 where the kernel has no IPv6.
Fd OpenAny(sockaddr_storage* any, socklen_t* length) {
  Fd fd(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  std::memset(any, 0, sizeof *any);
  if (fd.valid()) {
    const int off = 0;
    ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    auto* a = reinterpret_cast<sockaddr_in6*>(any);
    a->sin6_family = AF_INET6;
    *length = sizeof *a;
    Fd probe(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::bind(probe.get(), reinterpret_cast<sockaddr*>(any), *length) == 0) return fd;
  }
  auto* a = reinterpret_cast<sockaddr_in*>(any);
  std::memset(any, 0, sizeof *any);
  a->sin_family = AF_INET;
  *length = sizeof *a;
  return Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

void SetPort(sockaddr_storage* a, int port) {
  if (a->ss_family == AF_INET6)
    reinterpret_cast<sockaddr_in6*>(a)->sin6_port = htons(static_cast<uint16_t>(port));
  else
    reinterpret_cast<sockaddr_in*>(a)->sin_port = htons(static_cast<uint16_t>(port));
}

int GetPort(int fd) {
  sockaddr_storage a{};
  socklen_t length = sizeof a;
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&a), &length);
  return ntohs(a.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&a)->sin6_port
                                       : reinterpret_cast<sockaddr_in*>(&a)->sin_port);
}

Result ParseRange(const std::string& range, int* first, int* last) {
  *first = *last = 0;
  if (range.empty()) return {};
  int end = 0;
  if (std::sscanf(range.c_str(), "%d-%d%n", first, last, &end) != 2 ||
      end != static_cast<int>(range.size()) || *first < 1 || *last > 65535 || *first > *last)
    return Result::Fail(
        Code::kInvalid,
        "SPARKVOD_PORT_RANGE='" + range + "' was found, 'first-last' within 1-65535 was expected");
  return {};
}

socklen_t AbstractName(const std::string& name, sockaddr_un* out) {
  std::memset(out, 0, sizeof *out);
  out->sun_family = AF_UNIX;
  const size_t n = std::min(name.size(), sizeof out->sun_path - 1);
  std::memcpy(out->sun_path + 1, name.data(), n);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + n);
}

}  // namespace

Result ListenTcp(const std::string& address, const std::string& range, Fd* out, int* port) {
  int first, last;
  SPARKVOD_TRY(ParseRange(range, &first, &last));
  for (int p = first; p <= last; ++p) {
    sockaddr_storage a{};
    socklen_t length = 0;
    Fd fd;
    if (address.empty()) {
      fd = OpenAny(&a, &length);
    } else {
      SPARKVOD_TRY(Resolve(address, p, &a, &length));
      fd = Fd(::socket(a.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    }
    if (!fd.valid()) return Result::Errno("cannot open a TCP socket", errno);
    SetPort(&a, p);
    const int on = 1;
    if (p != 0) ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&a), length) == 0 &&
        ::listen(fd.get(), kBacklog) == 0) {
      *port = GetPort(fd.get());
      *out = std::move(fd);
      return {};
    }
    if (errno != EADDRINUSE && errno != EACCES)
      return Result::Errno("cannot listen on address '" + address + "' port " + std::to_string(p),
                           errno);
  }
  return Result::Fail(Code::kSystem,
                      "no free port in SPARKVOD_PORT_RANGE='" + range + "'; widen it");
}

Result ListenUnix(const std::string& name, Fd* out) {
  Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un a;
  const socklen_t length = AbstractName(name, &a);
  if (!fd.valid() || ::bind(fd.get(), reinterpret_cast<sockaddr*>(&a), length) != 0 ||
      ::listen(fd.get(), kBacklog) != 0)
    return Result::Errno("cannot listen on an abstract Unix socket", errno);
  *out = std::move(fd);
  return {};
}

bool UnixNameIsFree(const std::string& name) {
  const Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un a;
  const socklen_t length = AbstractName(name, &a);
  return fd.valid() && ::bind(fd.get(), reinterpret_cast<sockaddr*>(&a), length) == 0;
}

Result StartConnectTcp(const std::string& address, int port, Fd* out) {
  sockaddr_storage a{};
  socklen_t length = 0;
  SPARKVOD_TRY(Resolve(address, port, &a, &length));
  Fd fd(::socket(a.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return Result::Errno("cannot open a TCP socket", errno);
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&a), length) != 0 && errno != EINPROGRESS)
    return Result::Errno("cannot connect to " + address + " port " + std::to_string(port), errno);
  *out = std::move(fd);
  return {};
}

Result StartConnectUnix(const std::string& name, Fd* out) {
  Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un a;
  const socklen_t length = AbstractName(name, &a);
  if (!fd.valid()) return Result::Errno("cannot open a Unix socket", errno);
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&a), length) != 0)
    return Result::Errno("cannot connect to a local rank's Unix socket", errno);
  *out = std::move(fd);
  return {};
}

Result FinishConnect(int fd) {
  int error = 0;
  socklen_t length = sizeof error;
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
  return error == 0 ? Result::Ok() : Result::Errno("cannot connect", error);
}

Result Accept(int listener, Fd* out) {
  *out = Fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  // Who has gone before it was accepted is no error of this rank's.
  if (!out->valid() && (errno == EMFILE || errno == ENFILE))
    return Result::Errno("a connection cannot be accepted", errno);
  return {};
}

bool IsAnotherUsers(int fd) {
  int domain = 0;
  ucred other{};
  socklen_t length = sizeof domain, size = sizeof other;
  return ::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) == 0 && domain == AF_UNIX &&
         ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &other, &size) == 0 && other.uid != ::geteuid();
}

void TuneTcp(int fd) {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  static std::atomic<Grants> sends{Grants::kUnknown}, receives{Grants::kUnknown};
  for (const auto& [option, known] : {std::pair{SO_SNDBUF, &sends}, {SO_RCVBUF, &receives}})
    if (GrantsBuffer(option, known))
      ::setsockopt(fd, SOL_SOCKET, option, &kBufferBytes, sizeof kBufferBytes);
}

void KeepAlive(int fd, double seconds) {
  const int on = 1;
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  if (seconds <= 0) return;
  // A third of the time without a word, then probes: one or two that are lost on a bad link do not
  // end a world. The kernel takes whole seconds.
  const int idle = std::max(1, static_cast<int>(seconds / 3));
  const int between = std::max(1, static_cast<int>(seconds / 3 * 2 / 5));
  const int probes = std::max(2, static_cast<int>((seconds - idle) / between));
  for (const auto& [option, value] :
       {std::pair{TCP_KEEPIDLE, idle}, {TCP_KEEPINTVL, between}, {TCP_KEEPCNT, probes}})
    ::setsockopt(fd, IPPROTO_TCP, option, &value, sizeof value);
}

Result SendWithFds(int socket, const std::string& bytes, const std::vector<int>& fds) {
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(c), fds.data(), fds.size() * sizeof(int));
  }
  // A fresh Unix socket always has room for one small message.
  if (::sendmsg(socket, &message, MSG_NOSIGNAL) != static_cast<ssize_t>(bytes.size()))
    return Result::Errno("cannot hand shared memory to a local rank", errno,
                         errno == EPIPE || errno == ECONNRESET ? Code::kPeerLost : Code::kSystem);
  return {};
}

Result RecvWithFds(int socket, size_t most, int deadline_ms, std::string* out,
                   std::vector<Fd>* fds) {
  pollfd p{socket, POLLIN, 0};
  int ready;
  do ready = ::poll(&p, 1, deadline_ms);
  while (ready < 0 && errno == EINTR);
  if (ready == 0)
    return Result::Fail(Code::kTimeout, "it did not hand over its shared memory in time");
  out->assign(most, '\0');
  iovec part{out->data(), most};
  alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t n = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  const int error = errno;
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); n >= 0 && c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
      fds->emplace_back(fd);
    }
  }
  // The kernel leaves out those for which this process has no room.
  if (n > 0 && (message.msg_flags & MSG_CTRUNC) != 0)
    return Result::Errno("the shared memory of a local rank cannot be taken", EMFILE);
  if (n > 0) {
    out->resize(static_cast<size_t>(n));
    return {};
  }
  return n == 0 ? Result::Fail(Code::kPeerLost, "its process ended")
                : Result::Errno("its connection failed", error, Code::kPeerLost);
}

}  // namespace sparkvod
