#include "native/collectives/direct.h"

#include <algorithm>
#include <cstring>

namespace sparkvod {
namespace {

size_t PaddedBytes(DType dtype, size_t count) {
  return (count * SizeOf(dtype) + kCacheLine - 1) / kCacheLine * kCacheLine;
}

}  // namespace

size_t ShareBegin(DType dtype, size_t count, int r, int n) {
  const size_t line = kCacheLine / SizeOf(dtype);
  const size_t lines = (count + line - 1) / line;
  return std::min(count, lines * static_cast<size_t>(r) / static_cast<size_t>(n) * line);
}

size_t OneShotBytes(DType dtype, const std::vector<Part>& parts) {
  size_t bytes = 0;
  for (const Part& part : parts) bytes += PaddedBytes(dtype, part.count);
  return bytes;
}

void OneShotPublish(DType dtype, const std::vector<Part>& parts, char* to) {
  for (const Part& part : parts) {
    if (part.count > 0) std::memcpy(to, part.in, part.count * SizeOf(dtype));
    to += PaddedBytes(dtype, part.count);
  }
}

Result OneShotReduce(Communicator& comm, DType dtype, const std::vector<Part>& parts,
                     const std::vector<const char*>& places, Finish finish) {
  const Phase summing(comm.timeline(), "reduce");
  std::vector<const void*> srcs(places.begin(), places.end());
  for (const Part& part : parts) {
    void* dst = part.out;
    BestKernels().sum_to(dtype, &dst, 1, srcs.data(), comm.size(), part.count, finish);
    for (const void*& src : srcs)
      src = static_cast<const char*>(src) + PaddedBytes(dtype, part.count);
  }
  return {};
}

Result OneShotAllreduce(Communicator& comm, DType dtype, const std::vector<Part>& parts,
                        Finish finish) {
  // Two slots in turn: when this rank writes a slot again, all others have arrived at the
  // collective in between, so they have read what was there.
  SPARKVOD_TRY(comm.Settle());
  const int parity = static_cast<int>(comm.NextPhase() & 1);
  {
    const Phase publishing(comm.timeline(), "publish");
    OneShotPublish(dtype, parts, comm.slot(comm.local_rank(), parity));
  }
  SPARKVOD_TRY(comm.AwaitPhase(comm.Arrive()));
  std::vector<const char*> places;
  for (int r = 0; r < comm.size(); ++r) places.push_back(comm.slot(r, parity));
  return OneShotReduce(comm, dtype, parts, places, finish);
}

Result InPlaceAllreduce(Communicator& comm, DType dtype, const std::vector<int64_t>& offsets,
                        size_t count, Finish finish, Inputs inputs) {
  const int n = comm.size();
  const size_t begin = ShareBegin(dtype, count, comm.rank(), n);
  const size_t end = ShareBegin(dtype, count, comm.rank() + 1, n);
  std::vector<void*> buffers(static_cast<size_t>(n));
  for (int r = 0; r < n; ++r)
    buffers[static_cast<size_t>(r)] =
        comm.arena(r).base() + offsets[static_cast<size_t>(r)] + begin * SizeOf(dtype);
  if (inputs == Inputs::kWritten) SPARKVOD_TRY(comm.AwaitPhase(comm.Arrive()));
  if (end > begin) {
    const Phase summing(comm.timeline(), "reduce");
    BestKernels().sum_to(dtype, buffers.data(), n, buffers.data(), n, end - begin, finish);
  }
  return comm.AwaitPhase(comm.Arrive());  // everybody's share is written
}

// The tensor passes through the staging areas in chunks, double-buffered. In a chunk of c elements
// rank r owns the share [S(r), S(r+1)). Area of rank r, buffer b:  pub: c elements, its input but
// for its own share;  out: its reduced share.
//
//   publish(i+1); arrive A(i+1); await A(i); reduce(i); arrive B(i); await B(i); copy out(i)
//
// pub of chunk i+2 is written after B(i) was awaited, that is after all have reduced chunk i. out
// of chunk i+2 is written after A(i+2) was awaited, which all arrive at after they copied chunk i
// out.
Result StagedAllreduce(Communicator& comm, DType dtype, const Part& part, Finish finish) {
  const int n = comm.size(), me = comm.rank();
  const size_t size = SizeOf(dtype);
  const char* in = static_cast<const char*>(part.in);
  char* out = static_cast<char*>(part.out);
  // Two buffers of (chunk + share), each rounded up to lines, must fit; small chunks stay in the
  // caches.
  constexpr size_t kChunkBytes = 512 << 10;
  const size_t room = comm.staging_bytes() / 2;
  const size_t chunk =
      std::max<size_t>(std::min(kChunkBytes, room / 2) / kCacheLine * kCacheLine / size, 1);
  const size_t chunks = (part.count + chunk - 1) / chunk;
  const auto pub = [&](int r, size_t i) { return comm.staging(r) + (i & 1) * room; };
  const auto result = [&](int r, size_t i) { return pub(r, i) + chunk * size; };
  const auto length = [&](size_t i) { return std::min(chunk, part.count - i * chunk); };
  const auto share = [&](size_t i, int r) { return ShareBegin(dtype, length(i), r, n); };

  const auto publish = [&](size_t i) {
    const Phase publishing(comm.timeline(), "publish");
    const char* from = in + i * chunk * size;
    const size_t begin = share(i, me) * size, end = share(i, me + 1) * size;
    std::memcpy(pub(me, i), from, begin);
    std::memcpy(pub(me, i) + end, from + end, length(i) * size - end);
    return comm.Arrive();
  };

  SPARKVOD_TRY(comm.Settle());
  std::vector<const void*> srcs(static_cast<size_t>(n));
  uint64_t published = publish(0), next_published = 0;
  for (size_t i = 0; i < chunks; ++i) {
    if (i + 1 < chunks) next_published = publish(i + 1);
    SPARKVOD_TRY(comm.AwaitPhase(published));
    const size_t begin = share(i, me), end = share(i, me + 1);
    if (end > begin) {
      const Phase summing(comm.timeline(), "reduce");
      for (int r = 0; r < n; ++r)
        srcs[static_cast<size_t>(r)] = r == me ? in + (i * chunk + begin) * size
                                               : static_cast<const char*>(pub(r, i)) + begin * size;
      void* dsts[2] = {out + (i * chunk + begin) * size, result(me, i)};
      BestKernels().sum_to(dtype, dsts, 2, srcs.data(), n, end - begin, finish);
    }
    SPARKVOD_TRY(comm.AwaitPhase(comm.Arrive()));
    const Phase copying(comm.timeline(), "copy out");
    for (int r = 0; r < n; ++r) {
      if (r == me) continue;
      const size_t from = share(i, r), to = share(i, r + 1);
      std::memcpy(out + (i * chunk + from) * size, result(r, i), (to - from) * size);
    }
    published = next_published;
  }
  return {};
}

}  // namespace sparkvod
