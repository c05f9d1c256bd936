#include "native/collectives/notices.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace sparkvod {

bool Notices::PeerBegan() const {
  for (int r = 0; r < comm_->size(); ++r)
    if (r != comm_->rank() && Of(r, cycle_ + 1).cycle.load() == cycle_ + 1) return true;
  return false;
}

// Behind the bits, and in the first line with few of them.
char* Notices::DataOf(Notice& notice, size_t words) {
  constexpr size_t kAlign = 32;
  const size_t at = offsetof(Notice, bits) + words * sizeof(uint64_t);
  return reinterpret_cast<char*>(&notice) + (at + kAlign - 1) / kAlign * kAlign;
}

Result Notices::Agree(uint16_t* flags, std::vector<uint64_t>* bits, uint32_t* offer) {
  ++cycle_;
  const size_t words = bits->size(), bytes = words * sizeof(uint64_t);
  Notice& own = Own(cycle_);
  own.offer = *offer;
  own.flags = *flags;
  own.words = static_cast<uint16_t>(words);
  if (words > 0) std::memcpy(own.bits, bits->data(), bytes);
  // Sequentially consistent, as is whoever sleeps: it looks once more after it has said so.
  own.cycle.store(cycle_);
  for (int r = 0; r < comm_->size(); ++r)
    if (r != comm_->rank()) comm_->arena(r).RingForMessage();
  for (int r = 0; r < comm_->size(); ++r) {
    if (r == comm_->rank()) continue;
    const Notice& theirs = Of(r, cycle_);
    SPARKVOD_TRY(comm_->Progress(kForMessage, r, [&](Communicator::Step* step) -> Result {
      *step =
          theirs.cycle.load() == cycle_ ? Communicator::Step::kDone : Communicator::Step::kStuck;
      return {};
    }));
    if (theirs.words != words)
      return Result::Fail(Code::kPeerLost, comm_->Name(r) + " told of " +
                                               std::to_string(theirs.words) + " words of bits; " +
                                               std::to_string(words) + " were expected");
    *flags = static_cast<uint16_t>(*flags | theirs.flags);
    if (theirs.offer != *offer) *offer = 0;
    for (size_t i = 0; i < words; ++i) (*bits)[i] &= theirs.bits[i];
  }
  return {};
}

}  // namespace sparkvod
