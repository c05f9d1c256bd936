#include "native/collectives/tree.h"

#include <algorithm>
#include <vector>

#include "native/collectives/reduce_step.h"

namespace sparkvod {
namespace {

// What this rank has around it in the tree; ranks of the communicator.
struct Node {
  int parent = -1;            // -1: this is the root
  std::vector<int> children;  // the one with most ranks below it first
};

Node NodeOf(const Party& party, int root) {
  const int n = party.size(), v = (party.place - root + n) % n;
  const auto rank = [&](int of) { return party.rank((of + root) % n); };
  Node node;
  int bit = 1;
  while (bit < n && (v & bit) == 0) bit *= 2;
  if (v != 0) node.parent = rank(v - bit);
  for (bit /= 2; bit >= 1; bit /= 2)
    if (v + bit < n) node.children.push_back(rank(v + bit));
  return node;
}

}  // namespace

Result TreeBroadcast(Communicator& comm, const Party& party, void* data, size_t bytes, int root) {
  const Node node = NodeOf(party, root);
  const Phase told(comm.timeline(), "tree broadcast");
  char* const base = static_cast<char*>(data);
  size_t have = node.parent < 0 ? bytes : 0;
  std::vector<size_t> given(node.children.size());
  int awaited = node.parent;
  if (awaited < 0 && !node.children.empty()) awaited = node.children[0];
  return comm.Progress(kForMessage, awaited, [&](Communicator::Step* step) -> Result {
    *step = Communicator::Step::kStuck;
    SPARKVOD_TRY(
        comm.TryRecv(node.parent, base, std::min(bytes, have + kStepPieceBytes), &have, step));
    bool done = have == bytes;
    for (size_t c = 0; c < given.size(); ++c) {
      SPARKVOD_TRY(comm.TrySend(node.children[c], base, have, &given[c], step));
      done = done && given[c] == bytes;
    }
    if (done) *step = Communicator::Step::kDone;
    return {};
  });
}

Result TreeAllreduce(Communicator& comm, const Party& party, DType dtype, void* data, size_t count,
                     Finish finish) {
  const Node node = NodeOf(party, 0);
  char* const base = static_cast<char*>(data);
  const size_t bytes = count * SizeOf(dtype);
  {
    const Phase told(comm.timeline(), "tree reduce");
    std::vector<char> piece;
    // The child with fewest ranks below it is ready first.
    for (size_t c = node.children.size(); c-- > 0;) {
      const bool last = node.parent < 0 && c == 0;
      SPARKVOD_TRY(ReduceStep(comm, -1, nullptr, 0, node.children[c], base, base, bytes, dtype,
                              last ? finish : finish.Partial(), &piece));
    }
    if (node.parent >= 0) SPARKVOD_TRY(comm.Send(node.parent, data, bytes));
  }
  return TreeBroadcast(comm, party, data, bytes, 0);
}

}  // namespace sparkvod
