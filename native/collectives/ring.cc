#include "native/collectives/ring.h"

#include <algorithm>
#include <cstring>

#include "native/collectives/reduce_step.h"

namespace sparkvod {
Result RingAllreduce(Communicator& comm, const Party& party, DType dtype, void* data, size_t count,
                     Finish finish) {
  const int n = party.size(), me = party.place;
  const int next = party.rank((me + 1) % n), before = party.rank((me + n - 1) % n);
  const size_t size = SizeOf(dtype);
  char* const base = static_cast<char*>(data);
  const auto block = [&](int b) { return count * static_cast<size_t>(b) / static_cast<size_t>(n); };
  std::vector<char> piece;

  // Reduce-scatter. In step s this rank passes on block me-s, to which it has added its share, and
  // adds block me-s-1 to its own. What it adds last, block me+1, is complete.
  for (int s = 0; s < n - 1; ++s) {
    const Phase told(comm.timeline(), "ring reduce-scatter step");
    const int give = (me - s + n) % n, take = (me - s - 1 + n) % n;
    char* const sum = base + block(take) * size;
    SPARKVOD_TRY(ReduceStep(comm, next, base + block(give) * size,
                            (block(give + 1) - block(give)) * size, before, sum, sum,
                            (block(take + 1) - block(take)) * size, dtype,
                            s == n - 2 ? finish : finish.Partial(), &piece));
  }
  for (int s = 0; s < n - 1; ++s) {
    const Phase told(comm.timeline(), "ring allgather step");
    const int give = (me + 1 - s + n) % n, take = (me - s + n) % n;
    SPARKVOD_TRY(comm.SendRecv(next, base + block(give) * size,
                               (block(give + 1) - block(give)) * size, before,
                               base + block(take) * size, (block(take + 1) - block(take)) * size));
  }
  return {};
}

Result RingAllgather(Communicator& comm, char* data, const std::vector<size_t>& offsets) {
  const int n = comm.size(), me = comm.rank();
  const int next = (me + 1) % n, before = (me + n - 1) % n;
  const auto at = [&](int b) { return data + offsets[static_cast<size_t>(b)]; };
  const auto bytes = [&](int b) {
    return offsets[static_cast<size_t>(b) + 1] - offsets[static_cast<size_t>(b)];
  };
  for (int s = 0; s < n - 1; ++s) {
    const Phase told(comm.timeline(), "ring allgather step");
    const int give = (me - s + n) % n, take = (me - s - 1 + n) % n;
    SPARKVOD_TRY(comm.SendRecv(next, at(give), bytes(give), before, at(take), bytes(take)));
  }
  return {};
}

Result RingAllgather(Communicator& comm, char* data, size_t bytes) {
  std::vector<size_t> offsets;
  for (int r = 0; r <= comm.size(); ++r) offsets.push_back(static_cast<size_t>(r) * bytes);
  return RingAllgather(comm, data, offsets);
}

// Step s passes block me-s-1 on, as it was received and added to in the step before, and adds block
// me-s-2 of the own input to what comes; in the last step that is the own block.
Result RingReducescatter(Communicator& comm, DType dtype, const void* in, void* out,
                         const std::vector<size_t>& begins, Finish finish) {
  const int n = comm.size(), me = comm.rank();
  const int next = (me + 1) % n, before = (me + n - 1) % n;
  const size_t size = SizeOf(dtype);
  const auto at = [&](int b) {
    return static_cast<const char*>(in) + begins[static_cast<size_t>(b)] * size;
  };
  const auto bytes = [&](int b) {
    return (begins[static_cast<size_t>(b) + 1] - begins[static_cast<size_t>(b)]) * size;
  };
  std::vector<char> piece, passed, made;
  for (int s = 0; s < n - 1; ++s) {
    const int give = (me - s - 1 + n) % n, take = (me - s - 2 + 2 * n) % n;
    const bool last = s == n - 2;
    if (!last) made.resize(bytes(take));
    SPARKVOD_TRY(ReduceStep(comm, next, s == 0 ? at(give) : passed.data(), bytes(give), before,
                            at(take), last ? static_cast<char*>(out) : made.data(), bytes(take),
                            dtype, last ? finish : finish.Partial(), &piece));
    passed.swap(made);
  }
  return {};
}

Result PairwiseAlltoall(Communicator& comm, const void* in, char* out,
                        const std::vector<size_t>& bytes) {
  const auto n = static_cast<size_t>(comm.size()), me = static_cast<size_t>(comm.rank());
  std::vector<size_t> from(n + 1), to(n + 1);
  for (size_t r = 0; r < n; ++r) {
    from[r + 1] = from[r] + bytes[me * n + r];
    to[r + 1] = to[r] + bytes[r * n + me];
  }
  const char* const base = static_cast<const char*>(in);
  if (bytes[me * n + me] > 0) std::memcpy(out + to[me], base + from[me], bytes[me * n + me]);
  for (size_t s = 1; s < n; ++s) {
    const size_t give = (me + s) % n, take = (me + n - s) % n;
    SPARKVOD_TRY(comm.SendRecv(static_cast<int>(give), base + from[give], bytes[me * n + give],
                               static_cast<int>(take), out + to[take], bytes[take * n + me]));
  }
  return {};
}

Result ChainBroadcast(Communicator& comm, void* data, size_t bytes, int root) {
  const int n = comm.size(), place = (comm.rank() - root + n) % n;
  const int next = (comm.rank() + 1) % n, before = (comm.rank() + n - 1) % n;
  char* const base = static_cast<char*>(data);
  size_t have = place == 0 ? bytes : 0;       // bytes that are here
  size_t given = place == n - 1 ? bytes : 0;  // bytes that need not be passed on any more
  int awaited = place == 0 ? next : before;
  return comm.Progress(kForMessage, awaited, [&](Communicator::Step* step) -> Result {
    *step = Communicator::Step::kStuck;
    SPARKVOD_TRY(comm.TryRecv(before, base, std::min(bytes, have + kStepPieceBytes), &have, step));
    SPARKVOD_TRY(comm.TrySend(next, base, have, &given, step));
    awaited = have < bytes ? before : next;
    if (have == bytes && given == bytes) *step = Communicator::Step::kDone;
    return {};
  });
}

}  // namespace sparkvod
