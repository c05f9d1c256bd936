#include "native/collectives/dissemination.h"

#include <algorithm>
#include <cstring>

#include "native/base/wire.h"

namespace sparkvod {
namespace {

constexpr uint32_t kMagic = 0x63797631;
constexpr uint8_t kWake = 1;
constexpr uint8_t kRound = 2;
// No rank's requests of one cycle take this many bytes.
constexpr uint64_t kBlobLimit = 256 << 20;

}  // namespace

Dissemination::Dissemination(Communicator* comm) : comm_(comm) {
  while ((1 << rounds_) < comm->size()) ++rounds_;
}

Result Dissemination::PeerBegan(bool* began) {
  *began = false;
  for (int round = 0; round < rounds_; ++round) {
    const int from = From(round);
    Header header;
    size_t n = 0;
    if (Result r = comm_->channel(from).Peek(&header, sizeof header, &n); !r.ok())
      return comm_->Blame(from, r);
    if (n < sizeof header) continue;
    if (header.kind == kWake && header.cycle <= cycle_) {  // of a cycle that is over
      if (Result r = comm_->channel(from).TryRecv(&header, sizeof header, &n); !r.ok())
        return comm_->Blame(from, r);
      --round;
      continue;
    }
    *began = true;
    return {};
  }
  return {};
}

Result Dissemination::RecvRound(int from, int round, Header* header) {
  do {
    SPARKVOD_TRY(comm_->Recv(from, header, sizeof *header));
    if (header->magic != kMagic || (header->kind != kWake && header->kind != kRound))
      return Result::Fail(Code::kPeerLost,
                          comm_->Name(from) + " sent something that is no message of a cycle");
  } while (header->kind == kWake);
  if (header->cycle != cycle_ || header->round != round)
    return Result::Fail(Code::kPeerLost, comm_->Name(from) + " is in cycle " +
                                             std::to_string(header->cycle) + ", round " +
                                             std::to_string(header->round) + "; cycle " +
                                             std::to_string(cycle_) + ", round " +
                                             std::to_string(round) + " was expected");
  return {};
}

Result Dissemination::Agree(uint16_t* flags, std::vector<uint64_t>* bits) {
  ++cycle_;
  const size_t bytes = bits->size() * sizeof(uint64_t);
  buffer_.resize(sizeof(Header) + bytes);
  for (int round = 1; round < rounds_; ++round) {
    const Header wake{kMagic, kWake, 0, 0, cycle_};
    SPARKVOD_TRY(comm_->Send(To(round), &wake, sizeof wake));
  }
  heard_.resize(bits->size());
  for (int round = 0; round < rounds_; ++round) {
    const Header out{kMagic, kRound, static_cast<uint8_t>(round), *flags, cycle_};
    std::memcpy(buffer_.data(), &out, sizeof out);
    if (bytes > 0) std::memcpy(buffer_.data() + sizeof out, bits->data(), bytes);
    SPARKVOD_TRY(comm_->Send(To(round), buffer_.data(), buffer_.size()));
    Header in;
    SPARKVOD_TRY(RecvRound(From(round), round, &in));
    SPARKVOD_TRY(comm_->Recv(From(round), heard_.data(), bytes));
    *flags = static_cast<uint16_t>(*flags | in.flags);
    for (size_t i = 0; i < heard_.size(); ++i) (*bits)[i] &= heard_[i];
  }
  return {};
}

Result Dissemination::Exchange(int to, const std::string& out, int from, std::string* in) {
  const uint64_t out_bytes = out.size();
  uint64_t in_bytes = 0;
  SPARKVOD_TRY(comm_->SendRecv(to, &out_bytes, sizeof out_bytes, from, &in_bytes, sizeof in_bytes));
  if (in_bytes > kBlobLimit)
    return Result::Fail(Code::kPeerLost, comm_->Name(from) + " announced a message of " +
                                             std::to_string(in_bytes) +
                                             " bytes, more than any can have");
  in->resize(in_bytes);
  return comm_->SendRecv(to, out.data(), out.size(), from, in->data(), in->size());
}

Result Dissemination::Allgather(const std::string& own, std::vector<std::string>* all) {
  const int n = comm_->size(), me = comm_->rank();
  all->assign(static_cast<size_t>(n), {});
  (*all)[static_cast<size_t>(me)] = own;
  // Before round k this rank holds what ranks me, me-1, ... me-2^k+1 said.
  for (int round = 0; round < rounds_; ++round) {
    const int held = 1 << round, more = std::min(held, n - held);
    Writer out;
    for (int i = 0; i < more; ++i) out.PutString((*all)[static_cast<size_t>((me - i + n) % n)]);
    std::string in;
    SPARKVOD_TRY(Exchange(To(round), out.bytes(), From(round), &in));
    Reader reader(in);
    for (int i = 0; i < more; ++i)
      (*all)[static_cast<size_t>((From(round) - i + 2 * n) % n)] = reader.GetString(kBlobLimit);
    if (!reader.ok() || !reader.AtEnd())
      return Result::Fail(Code::kPeerLost,
                          comm_->Name(From(round)) + " sent a damaged list of requests");
  }
  return {};
}

}  // namespace sparkvod
