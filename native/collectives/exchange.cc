#include "native/collectives/exchange.h"

#include <algorithm>
#include <cstring>

namespace sparkvod {
namespace {

// What is moved at a time when a source goes to several places: it stays in the first cache.
constexpr size_t kPieceBytes = 16 << 10;
// From here on an output is larger than the caches, and is written past them.
constexpr size_t kStreamBytes = 4 << 20;
// Of a staging area that is published at a time: small enough to stay in the second cache.
constexpr size_t kChunkBytes = 256 << 10;

void Copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

// Lays `bytes` down in this rank's slot for the next phase, and waits until all have done so;
// returns the parity of the slots that hold it.
Result LayDown(Communicator& comm, const void* data, size_t bytes, int* parity) {
  SPARKVOD_TRY(comm.Settle());
  *parity = static_cast<int>(comm.NextPhase() & 1);
  Copy(comm.slot(comm.local_rank(), *parity), data, bytes);
  return comm.AwaitPhase(comm.Arrive());
}

// A published chunk's place: two halves of the staging area in turn, of which the first part is
// free when a collective begins (StagedAllreduce keeps its results behind it).
size_t HalfBytes(const Communicator& comm) { return comm.staging_bytes() / 2; }
size_t PublishedBytes(const Communicator& comm) {
  return std::min(kChunkBytes, HalfBytes(comm) / 2) / kCacheLine * kCacheLine;
}
char* Published(const Communicator& comm, int rank, size_t chunk) {
  return comm.staging(rank) + (chunk & 1) * HalfBytes(comm);
}

}  // namespace

Result PushBlocks(Communicator& comm, const char* output, const std::vector<Block>& blocks) {
  const int n = comm.size(), me = comm.rank();
  const int64_t own_place = output - comm.own_arena().base();
  int parity = 0;
  SPARKVOD_TRY(LayDown(comm, &own_place, sizeof own_place, &parity));
  std::vector<char*> to(static_cast<size_t>(n));
  size_t most = 0, total = 0;
  for (int r = 0; r < n; ++r) {
    int64_t place;
    std::memcpy(&place, comm.slot(r, parity), sizeof place);
    const Block& block = blocks[static_cast<size_t>(r)];
    to[static_cast<size_t>(r)] = comm.arena(r).base() + place + block.to;
    most = std::max(most, block.bytes);
    total += block.bytes;
  }
  const bool stream = total >= kStreamBytes;
  // What goes to one place only is moved in one go.
  const bool same = std::all_of(blocks.begin(), blocks.end(),
                                [&](const Block& b) { return b.from == blocks[0].from; });
  const size_t piece = same ? kPieceBytes : most;
  // Every rank begins with its own output, so that no two write to one rank's memory at a time for
  // long.
  for (size_t done = 0; done < most; done += piece) {
    for (int i = 0; i < n; ++i) {
      const auto r = static_cast<size_t>((me + i) % n);
      const Block& block = blocks[r];
      if (done >= block.bytes) continue;
      const size_t bytes = std::min(piece, block.bytes - done);
      const char* from = static_cast<const char*>(block.from) + done;
      if (stream)
        BestKernels().copy_streaming(to[r] + done, from, bytes);
      else
        std::memcpy(to[r] + done, from, bytes);
    }
  }
  return comm.AwaitPhase(comm.Arrive());  // everybody's blocks are written
}

Result PassBlocks(Communicator& comm, const void* own, size_t own_bytes,
                  const std::vector<Fetch>& fetches, char* output) {
  int parity = 0;
  SPARKVOD_TRY(LayDown(comm, own, own_bytes, &parity));
  for (int r = 0; r < comm.size(); ++r) {
    const Fetch& fetch = fetches[static_cast<size_t>(r)];
    Copy(output + fetch.to, comm.slot(r, parity) + fetch.at, fetch.bytes);
  }
  return {};
}

// The others wait for the root only, and arrive when they have read; the root goes on when all has
// been published. Staged: chunk i goes through half i & 1, which the root writes when all have read
// chunk i-2.
Result DirectBroadcast(Communicator& comm, void* data, size_t bytes, int root,
                       int64_t root_offset) {
  const bool is_root = comm.rank() == root;
  const bool small = bytes <= Geometry::kSlotBytes / 2;
  if (!small && root_offset >= 0) {
    // The root has submitted, so the data is there; when all have it, it may change.
    if (is_root) return comm.AwaitPhase(comm.Arrive());
    Copy(data, comm.arena(root).base() + root_offset, bytes);
    comm.Arrive();
    return {};
  }
  SPARKVOD_TRY(comm.Settle());
  const size_t chunk = small ? bytes : PublishedBytes(comm);
  const uint64_t first = comm.NextPhase();
  char* const base = static_cast<char*>(data);
  for (size_t i = 0, done = 0; done < bytes; ++i, done += chunk) {
    const size_t length = std::min(chunk, bytes - done);
    char* const place =
        small ? comm.slot(root, static_cast<int>(first & 1)) : Published(comm, root, i);
    if (is_root) {
      if (i >= 2) SPARKVOD_TRY(comm.AwaitPhase(first + i - 2));
      Copy(place, base + done, length);
    } else {
      SPARKVOD_TRY(comm.AwaitPhaseOf(root, first + i));
      Copy(base + done, place, length);
    }
    comm.Arrive();
  }
  return {};
}

// Staged: in step i each rank publishes the i-th piece of every other rank's share, one behind the
// other; all arrive; each reduces its own piece from all. The halves alternate as in
// DirectBroadcast.
Result DirectReducescatter(Communicator& comm, DType dtype, const void* in, void* out,
                           const std::vector<size_t>& begins, const std::vector<int64_t>& placement,
                           Finish finish, Inputs inputs) {
  const int n = comm.size(), me = comm.rank();
  const size_t size = SizeOf(dtype);
  const auto begin = [&](int r) { return begins[static_cast<size_t>(r)]; };
  const auto share = [&](int r) { return begin(r + 1) - begin(r); };
  const char* const input = static_cast<const char*>(in);
  char* const output = static_cast<char*>(out);
  std::vector<const void*> srcs(static_cast<size_t>(n));
  const auto reduce = [&](char* to, size_t count) {
    void* dst = to;
    if (count > 0) BestKernels().sum_to(dtype, &dst, 1, srcs.data(), n, count, finish);
  };

  if (begin(n) * size <= Geometry::kSlotBytes / 4) {
    int parity = 0;
    SPARKVOD_TRY(LayDown(comm, in, begin(n) * size, &parity));
    for (int r = 0; r < n; ++r)
      srcs[static_cast<size_t>(r)] = comm.slot(r, parity) + begin(me) * size;
    reduce(output, share(me));
    return {};
  }
  if (!placement.empty()) {
    if (inputs == Inputs::kWritten) SPARKVOD_TRY(comm.AwaitPhase(comm.Arrive()));
    for (int r = 0; r < n; ++r)
      srcs[static_cast<size_t>(r)] =
          comm.arena(r).base() + placement[static_cast<size_t>(r)] + begin(me) * size;
    reduce(output, share(me));
    return comm.AwaitPhase(comm.Arrive());  // everybody has read, so inputs may change
  }
  const size_t room = PublishedBytes(comm) / static_cast<size_t>(n);
  const size_t piece = std::max<size_t>(room / kCacheLine * kCacheLine, size) / size;
  size_t most = 0;
  for (int r = 0; r < n; ++r) most = std::max(most, share(r));
  SPARKVOD_TRY(comm.Settle());
  for (size_t i = 0, done = 0; done < most; ++i, done += piece) {
    const auto length = [&](int r) { return std::min(piece, share(r) - std::min(share(r), done)); };
    for (int r = 0; r < n; ++r)
      if (r != me)
        Copy(Published(comm, me, i) + static_cast<size_t>(r) * piece * size,
             input + (begin(r) + done) * size, length(r) * size);
    SPARKVOD_TRY(comm.AwaitPhase(comm.Arrive()));
    for (int r = 0; r < n; ++r)
      srcs[static_cast<size_t>(r)] =
          r == me ? input + (begin(me) + done) * size
                  : Published(comm, r, i) + static_cast<size_t>(me) * piece * size;
    reduce(output + done * size, length(me));
  }
  comm.Arrive();
  return {};
}

}  // namespace sparkvod
