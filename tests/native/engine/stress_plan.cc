#include "tests/native/engine/stress_plan.h"

#include <algorithm>
#include <numeric>

namespace sparkvod::check {
namespace {

// Names that come again, so that what is agreed on is one bit from the second time on.
constexpr size_t kNames = 24;
constexpr uint64_t kMostWindow = 8;
constexpr int kStreams = 3;

// From 4 bytes to 1 MiB, of each size as many.
int64_t SomeBytes(Dice* dice) {
  const auto least = int64_t{4} << dice->Below(19);
  return least + static_cast<int64_t>(dice->Below(static_cast<uint64_t>(least)));
}

Config SomeConfig(Dice* dice) {
  Config config = TestConfig();
  config.arena_bytes = int64_t{512} << 20;
  config.cache_capacity = dice->Of<int64_t>({0, 1, 5, 70, 1024});
  config.spin_us = dice->Of<int64_t>({0, 50, 50});
  config.linger_us = dice->Of<int64_t>({0, 0, 300});
  config.staging_bytes = dice->Of<int64_t>({65536, 262144});
  config.one_shot_bytes = dice->Of<int64_t>({0, 32768, 131072});
  config.fusion_threshold = dice->Of<int64_t>({0, 30000, 64 << 20});
  config.tcp_streams = kStreams;
  return config;
}

Tunables SomeTunables(Dice* dice) {
  Tunables tunables;
  tunables.fusion_threshold = dice->Of<int64_t>({0, 30000, 64 << 20});
  tunables.linger_us = dice->Of<int64_t>({0, 0, 100});
  tunables.one_shot_bytes = dice->Of<int64_t>({0, 4096, 32768, 131072});
  tunables.link_mbits = dice->Of<int64_t>({10, 10000});
  tunables.tcp_streams = dice->Of<int64_t>({1, 2, kStreams});
  return tunables;
}

std::vector<std::vector<int64_t>> SomeSets(Dice* dice, int size) {
  std::vector<std::vector<int64_t>> sets(1);
  for (int r = 0; r < size; ++r) sets[0].push_back(r);
  for (uint64_t tries = dice->Below(5); tries > 0; --tries) {
    std::vector<int64_t> ranks;
    for (int r = 0; r < size; ++r)
      if (dice->OneIn(2)) ranks.push_back(r);
    if (!ranks.empty() && std::find(sets.begin(), sets.end(), ranks) == sets.end())
      sets.push_back(ranks);
  }
  return sets;
}

void SomeShape(Dice* dice, size_t ranks, Step* step) {
  const auto n = static_cast<int64_t>(ranks);
  int64_t bytes = SomeBytes(dice);
  // What others make of it is as large.
  if (HasOwnRows(step->collective)) bytes = bytes / n + 1;
  do step->dtype = dice->Of(kReduced);
  while (!Supported(step->dtype, step->op) ||
         LeftOut(step->dtype, static_cast<size_t>(bytes) / SizeOf(step->dtype)));
  step->width = dice->Of<int64_t>({1, 1, 3, 16});
  step->rows = bytes / static_cast<int64_t>(SizeOf(step->dtype)) / step->width;
  if (dice->OneIn(20)) step->rows = 0;
}

Step SomeStep(Dice* dice, const std::vector<std::vector<int64_t>>& sets) {
  Step step;
  step.collective =
      dice->Of<Collective>({Collective::kAllreduce, Collective::kAllreduce, Collective::kAllreduce,
                            Collective::kAllgather, Collective::kBroadcast, Collective::kBarrier,
                            Collective::kReducescatter, Collective::kAlltoall});
  step.set = dice->OneIn(2) ? dice->Below(sets.size()) : 0;
  const size_t ranks = sets[step.set].size();
  if (Reduces(step.collective)) step.op = dice->Of(kOps);
  SomeShape(dice, ranks, &step);
  const bool several =
      step.collective == Collective::kAllreduce || step.collective == Collective::kAllgather;
  if (several && dice->OneIn(4)) step.tensors = 2 + dice->Below(3);
  step.root = static_cast<int>(dice->Below(ranks));
  return step;
}

// Every second one of the names has no other shape when it comes again.
Step Again(Dice* dice, const std::vector<std::vector<int64_t>>& sets, Step step) {
  const size_t ranks = sets[step.set].size();
  if (dice->OneIn(8)) SomeShape(dice, ranks, &step);
  if (dice->OneIn(12) && ranks > 1 && step.collective != Collective::kBarrier)
    step.odd = static_cast<int>(dice->Below(ranks));
  return step;
}

size_t RowsOf(const Step& step, int place) {
  return static_cast<size_t>(step.rows + (step.rows > 0 ? place % 3 : 0));
}

// Rows from one place to another, of an alltoall.
int64_t SplitOf(const Step& step, int from, int to) { return step.rows * ((from + to) % 3) / 2; }

// Of the given bytes' elements from some on, another one for each step.
std::vector<uint8_t> From(const Step& step, DType dtype, std::vector<uint8_t> bytes) {
  const auto skipped =
      static_cast<std::ptrdiff_t>(static_cast<size_t>(step.number % 89) * SizeOf(dtype));
  bytes.erase(bytes.begin(), bytes.begin() + skipped);
  return bytes;
}

std::vector<uint8_t> Given(const Step& step, DType dtype, size_t ranks, int place, size_t count) {
  return From(step, dtype,
              Input(dtype, step.op, static_cast<int>(ranks), place,
                    count + static_cast<size_t>(step.number % 89)));
}

std::vector<uint8_t> Made(const Step& step, DType dtype, size_t ranks, size_t count) {
  return From(step, dtype,
              Expected(dtype, step.op, static_cast<int>(ranks),
                       count + static_cast<size_t>(step.number % 89)));
}

void Append(std::vector<uint8_t>* to, const std::vector<uint8_t>& bytes, size_t begin, size_t end) {
  to->insert(to->end(), bytes.begin() + static_cast<std::ptrdiff_t>(begin),
             bytes.begin() + static_cast<std::ptrdiff_t>(end));
}

// Tensors of a group differ in size and, where the operation allows, in dtype.
DType DTypeOf(const Step& step, size_t tensor) {
  return tensor % 2 == 1 ? DType::kInt32 : step.dtype;
}
int64_t ShapeRows(int64_t rows, size_t tensor) {
  return tensor == 0 ? rows : rows / (2 * static_cast<int64_t>(tensor)) + 1;
}

}  // namespace

Plan PlanOf(uint64_t seed, int size, size_t epochs, size_t windows) {
  Dice dice(seed);
  Plan plan;
  plan.config = SomeConfig(&dice);
  if (dice.OneIn(4))
    for (int r = 0; r < size; ++r) plan.hosts.emplace_back(r < size / 2 ? "a" : "b");
  int number = 0;
  // Goes on from epoch to epoch: what is on its way keeps its name.
  size_t next = 0;
  for (size_t e = 0; e < epochs; ++e) {
    Epoch epoch;
    epoch.sets = SomeSets(&dice, size);
    epoch.drops_sets = dice.OneIn(2);
    if (dice.OneIn(2)) epoch.beside = 1 + dice.Below(4 * windows);
    std::vector<Step> steps;
    for (size_t i = 0; i < kNames; ++i) steps.push_back(SomeStep(&dice, epoch.sets));
    const uint64_t most = dice.OneIn(2) ? 1 : kMostWindow;
    for (size_t w = 0; w < windows; ++w) {
      std::vector<Step> window;
      for (uint64_t left = 1 + dice.Below(most); left > 0; --left) {
        Step step = Again(&dice, epoch.sets, steps[next % kNames]);
        step.name = "step" + std::to_string(next % kNames);
        if (dice.OneIn(40)) {
          step = Step{};
          step.collective = Collective::kTune;
          step.tunables = SomeTunables(&dice);
          step.name = "tune" + std::to_string(number);
          step.root = static_cast<int>(dice.Below(static_cast<uint64_t>(size) + 1)) - 1;
        }
        step.number = number++;
        ++next;
        window.push_back(std::move(step));
      }
      epoch.windows.push_back(std::move(window));
    }
    if (dice.OneIn(2))
      for (int r = 0; r < size; ++r) epoch.joins.push_back(static_cast<int>(dice.Below(5)));
    plan.epochs.push_back(std::move(epoch));
  }
  return plan;
}

Share ShareOf(const Step& step, const std::vector<int64_t>& ranks, int place) {
  Share share;
  Request& request = share.request;
  request.name = step.name;
  request.collective = step.collective;
  request.op = Reduces(step.collective) ? step.op : ReduceOp::kSum;
  const size_t n = ranks.size();
  const auto width = static_cast<size_t>(step.width);
  if (step.collective == Collective::kTune) {
    request.root = step.root < 0 ? kByAll : step.root;
    request.splits = Pack(step.tunables);
    return share;
  }
  if (step.collective == Collective::kBarrier) return share;
  if (step.collective == Collective::kBroadcast)
    request.root = static_cast<int32_t>(ranks[static_cast<size_t>(step.root)]);
  for (size_t k = 0; k < step.tensors; ++k) {
    Entry entry;
    entry.dtype = DTypeOf(step, k);
    const size_t item = SizeOf(entry.dtype) * width;
    Step part = step;
    part.rows = ShapeRows(step.rows, k);
    const size_t count = static_cast<size_t>(part.rows) * width;
    std::vector<uint8_t> gives, becomes;
    switch (step.collective) {
      case Collective::kAllreduce:
      case Collective::kReducescatter: {
        gives = Given(step, entry.dtype, n, place, count);
        becomes = Made(step, entry.dtype, n, count);
        if (step.collective == Collective::kAllreduce) break;
        const std::vector<uint8_t> all = std::move(becomes);
        becomes.clear();
        const auto row = [&](int r) {
          return static_cast<size_t>(FirstRow(part.rows, r, static_cast<int>(n))) * item;
        };
        Append(&becomes, all, row(place), row(place + 1));
        break;
      }
      case Collective::kBroadcast:
        gives = place == step.root ? Given(step, entry.dtype, n, place, count)
                                   : std::vector<uint8_t>(count * SizeOf(entry.dtype), 0xee);
        becomes = Given(step, entry.dtype, n, step.root, count);
        break;
      case Collective::kAllgather:
        for (int p = 0; p < static_cast<int>(n); ++p) {
          const std::vector<uint8_t> of = Given(step, entry.dtype, n, p, RowsOf(part, p) * width);
          Append(&becomes, of, 0, of.size());
          if (p == place) gives = of;
        }
        part.rows = static_cast<int64_t>(RowsOf(part, place));
        break;
      default:  // alltoall
        for (int p = 0; p < static_cast<int>(n); ++p) {
          int64_t before = 0, own = 0, all = 0;
          for (int q = 0; q < static_cast<int>(n); ++q) {
            const int64_t rows = SplitOf(part, p, q);
            if (q < place) before += rows;
            if (q == place) own = rows;
            all += rows;
          }
          const std::vector<uint8_t> of =
              Given(step, entry.dtype, n, p, static_cast<size_t>(all) * width);
          Append(&becomes, of, static_cast<size_t>(before) * item,
                 static_cast<size_t>(before + own) * item);
          if (p == place) gives = of;
        }
        for (int q = 0; q < static_cast<int>(n); ++q)
          request.splits.push_back(SplitOf(part, place, q));
        part.rows = std::accumulate(request.splits.begin(), request.splits.end(), int64_t{0});
        break;
    }
    entry.shape = {part.rows, step.width};
    if (place == step.odd) {
      // One more in each row, for which there must be memory.
      ++entry.shape[1];
      gives.resize(static_cast<size_t>(entry.count()) * SizeOf(entry.dtype));
    }
    request.entries.push_back(std::move(entry));
    share.gives.push_back(std::move(gives));
    share.becomes.push_back(std::move(becomes));
  }
  return share;
}

}  // namespace sparkvod::check
