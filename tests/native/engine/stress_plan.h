// What a world does in a stress test: for one seed the same on every rank, and nothing that a rank
// may do in its own way (when, in which order, how it waits) decides what comes out.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "native/base/tunables.h"
#include "native/engine/engine.h"
#include "tests/native/engine/exact.h"

namespace sparkvod::check {

class Dice {
 public:
  explicit Dice(uint64_t seed) : numbers_(seed) {}
  uint64_t Below(uint64_t n) { return numbers_() % n; }
  bool OneIn(uint64_t n) { return Below(n) == 0; }
  template <typename T>
  const T& Of(const std::vector<T>& some) {
    return some[Below(some.size())];
  }
  template <typename T>
  void Shuffle(std::vector<T>* some) {
    for (size_t i = some->size(); i > 1; --i) std::swap((*some)[i - 1], (*some)[Below(i)]);
  }

 private:
  std::mt19937_64 numbers_;
};

// One collective of all ranks of a set.
struct Step {
  int number = 0;  // of the world's steps: what is given and expected differs from one to the next
  std::string name;
  Collective collective = Collective::kAllreduce;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  int64_t rows = 1, width = 1;
  size_t tensors = 1;
  size_t set = 0;  // 0: the world
  int root = 0;    // by place
  int odd = -1;    // the place of who submits another shape; -1: nobody
  Tunables tunables;
};

struct Epoch {
  std::vector<std::vector<int64_t>> sets;  // the first is the world
  // What is submitted together, in any order. All of a window has ended before the one after the
  // next begins.
  std::vector<std::vector<Step>> windows;
  size_t beside = 0;        // collectives of another thread meanwhile
  std::vector<int> joins;   // by rank: steps before it joins; empty: nobody does
  bool drops_sets = false;  // while other collectives are pending
};

struct Plan {
  Config config;
  std::vector<std::string> hosts;
  std::vector<Epoch> epochs;
};

// `windows` of each epoch.
Plan PlanOf(uint64_t seed, int size, size_t epochs, size_t windows);

// One rank's part of a step: its request, what it gives, and what comes of it, tensor by tensor.
struct Share {
  Request request;  // without its process set
  std::vector<std::vector<uint8_t>> gives, becomes;
};
Share ShareOf(const Step& step, const std::vector<int64_t>& ranks, int place);

}  // namespace sparkvod::check
