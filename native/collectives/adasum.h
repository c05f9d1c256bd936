// Adasum: an adaptive sum of gradients that point in different directions.
//
// Two vectors are combined as a·(1 − a·b/2‖a‖²) + b·(1 − a·b/2‖b‖²): their sum when they are
// orthogonal, their mean when they are equal. More are combined in a tree: pairs of neighbours,
// then pairs of these, and so on; who has no neighbour goes up as it is, so any number of ranks
// will do. (Maleki et al., "Scaling distributed training with adaptive summation", 2021.)
//
// Each rank keeps its share of the elements of all ranks' vectors and computes the whole tree on
// it, so that it needs of the others no more than the products of each level, three numbers (nine
// for float64, whose squares overflow a double) for each tensor of each pair. Moves N(n-1)/n bytes
// to and from each rank twice, as a ring allreduce does; ceil(log2 n) small exchanges more.
#pragma once

#include <functional>
#include <vector>

#include "native/base/dtype.h"
#include "native/base/result.h"

namespace sparkvod {

// One rank's share of every rank's vector: elements [0, count) of `vectors`[r], which are changed.
// `ends`: where in the share each tensor ends.
struct AdasumShare {
  DType dtype = DType::kFloat32;
  std::vector<char*> vectors;
  std::vector<size_t> ends;
};

// Sums numbers over the ranks.
using SumDoubles = std::function<Result(std::vector<double>*)>;

// Combines the vectors into the first one.
Result AdasumTree(const AdasumShare& share, const SumDoubles& sum);

}  // namespace sparkvod
