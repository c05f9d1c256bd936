#include "native/transport/shared/ring_channel.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "native/transport/socket.h"

namespace sparkvod {
namespace {

void CopyIn(ByteRing& ring, uint64_t at, const char* data, size_t bytes) {
  const size_t offset = at % ByteRing::kBytes;
  const size_t first = std::min(bytes, ByteRing::kBytes - offset);
  std::memcpy(ring.data + offset, data, first);
  std::memcpy(ring.data, data + first, bytes - first);
}

void CopyOut(const ByteRing& ring, uint64_t at, char* data, size_t bytes) {
  const size_t offset = at % ByteRing::kBytes;
  const size_t first = std::min(bytes, ByteRing::kBytes - offset);
  std::memcpy(data, ring.data + offset, first);
  std::memcpy(data + first, ring.data, bytes - first);
}

}  // namespace

// The stores of head and tail are sequentially consistent, as are the loads of `sleeper` and
// `blocked` that follow them and the sleeper's store and last look: one of the two sides always
// sees the other, so no wake-up is lost.
Result RingChannel::TrySend(const void* data, size_t bytes, size_t* sent) {
  const auto room_now = [&] { return ByteRing::kBytes - static_cast<size_t>(sent_ - tail_); };
  size_t room = room_now();
  if (room < bytes) {
    tail_ = out_.tail.load();
    room = room_now();
  }
  if (room == 0) {
    out_.blocked.store(1);
    tail_ = out_.tail.load();
    room = room_now();
  }
  const size_t n = *sent = std::min(bytes, room);
  if (n == 0) return {};
  CopyIn(out_, sent_, static_cast<const char*>(data), n);
  sent_ += n;
  out_.head.store(sent_);
  peer_->RingForMessage();
  return {};
}

Result RingChannel::TryRecv(void* data, size_t bytes, size_t* received) {
  const size_t n = *received = std::min(bytes, static_cast<size_t>(in_.head.load() - received_));
  if (n == 0) return {};
  CopyOut(in_, received_, static_cast<char*>(data), n);
  received_ += n;
  in_.tail.store(received_);
  if (in_.blocked.load() != 0) {
    in_.blocked.store(0);
    peer_->RingForMessage();
  }
  return {};
}

Result RingChannel::Peek(void* data, size_t bytes, size_t* available) {
  const size_t n = *available = std::min(bytes, static_cast<size_t>(in_.head.load() - received_));
  if (n != 0) CopyOut(in_, received_, static_cast<char*>(data), n);
  return {};
}

bool ArenaLink::Left(Departure* how) {
  const ArenaHeader& header = peer_->header();
  if (header.left.load() != 0) {
    how->orderly = header.orderly != 0;
    how->relayed = header.relayed != 0;
    how->code = static_cast<Code>(header.code);
    // The peer's memory is not trusted to end its string.
    how->cause.assign(header.cause, ::strnlen(header.cause, sizeof header.cause));
    return true;
  }
  if (!socket_.valid()) return false;
  char byte;
  const ssize_t n = ::recv(socket_.get(), &byte, 1, MSG_DONTWAIT | MSG_PEEK);
  if (n < 0 && WouldBlock(errno)) return false;
  // Closed: it may have told why between the two looks.
  if (header.left.load() != 0) return Left(how);
  *how = Departure{};
  // A byte would hide the end behind it, and keep the poller awake for ever.
  how->cause = n > 0 ? "it sent bytes where a rank sends none" : "its process ended";
  return true;
}

void ArenaLink::Tell(const Departure& how, ArenaHeader* own) {
  if (own->left.load() != 0) return;
  own->orderly = how.orderly ? 1 : 0;
  own->relayed = how.relayed ? 1 : 0;
  own->code = static_cast<uint32_t>(how.code);
  const size_t n = std::min(how.cause.size(), sizeof own->cause - 1);
  std::memcpy(own->cause, how.cause.data(), n);
  own->cause[n] = 0;
  own->left.store(1);
}

void ArenaLink::Leave(const Departure& how) {
  Tell(how, &own_->header());
  peer_->header().departures.fetch_add(1);
  peer_->RingAnyway();
}

}  // namespace sparkvod
