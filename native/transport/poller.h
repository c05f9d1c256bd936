// epoll with one event descriptor of its own, which anybody may ring.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "native/base/result.h"
#include "native/transport/fd.h"

namespace sparkvod {

class Poller {
 public:
  // `one_shot`: a watched descriptor that fired stays silent until Rearm(). Otherwise it fires at
  // every new edge.
  static Result Create(bool one_shot, Poller* out);

  // What a descriptor carries: bytes of a channel (readable, and writable where `kStream`), or news
  // of a peer's leaving.
  enum class Kind { kStream, kIncoming, kNews };
  Result Watch(int fd, Kind kind);
  // Whether a descriptor has fired and was not re-armed since.
  bool any_fired() const { return any_fired_.load(); }
  // Makes the descriptors that fired fire again (one-shot pollers).
  void Rearm();
  // Sleeps until something fires or `timeout_ms` (-1: for ever) has passed; drains the own bell.
  // True when a kNews fired.
  bool Sleep(int timeout_ms);
  // Wakes the sleeper, now or at its next Sleep.
  void Ring() const { RingFd(bell_->get()); }
  // Shared with whoever may ring it for longer than this poller is there.
  const std::shared_ptr<const Fd>& bell() const { return bell_; }

  static void RingFd(int fd);

 private:
  struct Watched {
    int fd;
    uint32_t events;
    bool news;
    bool fired;
  };
  bool one_shot_ = false;
  std::atomic<bool> any_fired_{false};
  Fd epoll_;
  std::shared_ptr<const Fd> bell_;
  std::vector<Watched> watched_;
};

}  // namespace sparkvod
