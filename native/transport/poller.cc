#include "native/transport/poller.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <cstdint>

namespace sparkvod {

Result Poller::Create(bool one_shot, Poller* out) {
  out->one_shot_ = one_shot;
  out->epoll_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
  if (!out->epoll_.valid()) return Result::Errno("epoll_create1 failed", errno);
  out->bell_ = std::make_shared<Fd>(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!out->bell_->valid()) return Result::Errno("eventfd failed", errno);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = out->bell_->get();
  if (::epoll_ctl(out->epoll_.get(), EPOLL_CTL_ADD, out->bell_->get(), &event) != 0)
    return Result::Errno("epoll_ctl failed", errno);
  return {};
}

Result Poller::Watch(int fd, Kind kind) {
  Watched w{fd, EPOLLIN | EPOLLRDHUP | EPOLLET, kind == Kind::kNews, false};
  if (kind == Kind::kStream) w.events |= EPOLLOUT;
  if (one_shot_) w.events |= EPOLLONESHOT;
  epoll_event event{};
  event.events = w.events;
  event.data.fd = fd;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
    return Result::Errno("epoll_ctl failed", errno);
  watched_.push_back(w);
  return {};
}

void Poller::Rearm() {
  any_fired_.store(false);
  for (Watched& w : watched_) {
    if (!w.fired) continue;
    epoll_event event{};
    event.events = w.events;
    event.data.fd = w.fd;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, w.fd, &event);
    w.fired = false;
  }
}

bool Poller::Sleep(int timeout_ms) {
  epoll_event events[64];
  bool news = false;
  const int n = ::epoll_wait(epoll_.get(), events, 64, timeout_ms);
  for (int i = 0; i < n; ++i) {
    if (events[i].data.fd == bell_->get()) {
      uint64_t count;
      (void)!::read(bell_->get(), &count, sizeof count);
      continue;
    }
    for (Watched& w : watched_)
      if (w.fd == events[i].data.fd) {
        w.fired = true;
        any_fired_.store(true);
        news = news || w.news;
      }
  }
  return news;
}

void Poller::RingFd(int fd) {
  const uint64_t one = 1;
  (void)!::write(fd, &one, sizeof one);  // a full counter is a bell that rings already
}

}  // namespace sparkvod
