#include "native/collectives/recursive.h"

#include <functional>
#include <utility>
#include <vector>

#include "native/collectives/reduce_step.h"

namespace sparkvod {
namespace {

struct Span {
  size_t begin = 0, end = 0;  // elements
  size_t middle() const { return begin + (end - begin) / 2; }
};

// Folds the ranks beyond a power of two in, lets `paired` work among the others, who are a power of
// two, and gives those that sat out the result.
Result Folded(Communicator& comm, const Party& party, DType dtype, char* data, size_t count,
              const Finish& finish, const std::function<Result(const Party&)>& paired) {
  const int n = party.size(), me = party.place;
  int power = 1;
  while (2 * power <= n) power *= 2;
  const int extra = n - power;
  const size_t bytes = count * SizeOf(dtype);
  const bool folds = me < 2 * extra;
  const int partner = folds ? party.rank(me ^ 1) : -1;
  if (folds) {
    const Phase told(comm.timeline(), "fold in");
    if (me % 2 == 1) {
      SPARKVOD_TRY(comm.Send(partner, data, bytes));
      return comm.Recv(partner, data, bytes);
    }
    std::vector<char> piece;
    SPARKVOD_TRY(ReduceStep(comm, -1, nullptr, 0, partner, data, data, bytes, dtype,
                            finish.Partial(), &piece));
  }
  Party others;
  for (int v = 0; v < power; ++v) others.ranks.push_back(party.rank(v < extra ? 2 * v : v + extra));
  others.place = folds ? me / 2 : me - extra;
  SPARKVOD_TRY(paired(others));
  if (!folds) return {};
  const Phase told(comm.timeline(), "fold out");
  return comm.Send(partner, data, bytes);
}

}  // namespace

Result HalvingDoublingAllreduce(Communicator& comm, const Party& party, DType dtype, void* data,
                                size_t count, Finish finish) {
  char* const base = static_cast<char*>(data);
  const size_t size = SizeOf(dtype);
  const auto at = [&](const Span& s) { return base + s.begin * size; };
  const auto bytes = [&](const Span& s) { return (s.end - s.begin) * size; };
  return Folded(comm, party, dtype, base, count, finish, [&](const Party& pairs) -> Result {
    std::vector<char> piece;
    std::vector<Span> kept{{0, count}};  // what this rank kept, step by step
    std::vector<Span> given;
    for (int bit = 1; bit < pairs.size(); bit *= 2) {
      const Phase told(comm.timeline(), "halving step");
      const Span all = kept.back();
      const Span lower{all.begin, all.middle()}, upper{all.middle(), all.end};
      const bool takes_lower = (pairs.place & bit) == 0;
      kept.push_back(takes_lower ? lower : upper);
      given.push_back(takes_lower ? upper : lower);
      const int partner = pairs.rank(pairs.place ^ bit);
      const bool last = 2 * bit == pairs.size();
      SPARKVOD_TRY(ReduceStep(comm, partner, at(given.back()), bytes(given.back()), partner,
                              at(kept.back()), at(kept.back()), bytes(kept.back()), dtype,
                              last ? finish : finish.Partial(), &piece));
    }
    for (int bit = pairs.size() / 2; bit >= 1; bit /= 2) {
      const Phase told(comm.timeline(), "doubling step");
      const int partner = pairs.rank(pairs.place ^ bit);
      SPARKVOD_TRY(comm.SendRecv(partner, at(kept.back()), bytes(kept.back()), partner,
                                 at(given.back()), bytes(given.back())));
      kept.pop_back();
      given.pop_back();
    }
    return {};
  });
}

Result DoublingAllreduce(Communicator& comm, const Party& party, DType dtype, void* data,
                         size_t count, Finish finish) {
  char* const base = static_cast<char*>(data);
  const size_t bytes = count * SizeOf(dtype);
  return Folded(comm, party, dtype, base, count, finish, [&](const Party& pairs) -> Result {
    std::vector<char> theirs(bytes);
    for (int bit = 1; bit < pairs.size(); bit *= 2) {
      const Phase told(comm.timeline(), "doubling step");
      const int partner = pairs.rank(pairs.place ^ bit);
      SPARKVOD_TRY(comm.SendRecv(partner, base, bytes, partner, theirs.data(), bytes));
      const void* srcs[2] = {base, theirs.data()};
      if ((pairs.place & bit) != 0) std::swap(srcs[0], srcs[1]);
      void* dst = base;
      BestKernels().sum_to(dtype, &dst, 1, srcs, 2, count,
                           2 * bit == pairs.size() ? finish : finish.Partial());
    }
    return {};
  });
}

}  // namespace sparkvod
