#include "native/backends/builtin/builtin.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>

#include "native/collectives/adasum.h"
#include "native/collectives/cost.h"
#include "native/collectives/direct.h"
#include "native/collectives/exchange.h"
#include "native/collectives/flat.h"
#include "native/collectives/hierarchical.h"
#include "native/collectives/recursive.h"
#include "native/collectives/ring.h"
#include "native/collectives/tree.h"
#include "native/kernels/reduce.h"

namespace sparkvod {
namespace {

// Of a large tensor in ordinary memory that crosses hosts at a time.
constexpr size_t kPieceBytes = 16 << 20;
// Of a block that passes through a slot rather than by way of the output's place.
constexpr size_t kSmallBlockBytes = 16 << 10;

Combine CombineOf(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMin:
      return Combine::kMin;
    case ReduceOp::kMax:
      return Combine::kMax;
    case ReduceOp::kProduct:
      return Combine::kProduct;
    default:
      return Combine::kSum;
  }
}

class Builtin : public Backend {
 public:
  Builtin(Communicator* comm, const Wishes& wishes, const Config& config)
      : comm_(comm),
        wishes_(wishes),
        link_gbits_(config.link_gbits),
        one_shot_bytes_(OneShotLimit(config.one_shot_bytes)) {
    const Topology& topology = comm->topology();
    std::map<std::string, int> on_host;
    for (const std::string& id : topology.host_ids)
      layout_.per_host = std::max(layout_.per_host, ++on_host[id]);
    layout_.ranks = topology.size;
    layout_.hosts = static_cast<int>(on_host.size());
    layout_.shares_memory = comm->shares_memory();
    layout_.hierarchical = comm->hierarchical();
  }
  ~Builtin() override {
    if (fusion_ != nullptr) comm_->own_arena().heap()->Free(fusion_);
  }

  const char* name() const override { return "builtin"; }
  bool Supports(Collective collective, ReduceOp op, DType dtype) const override {
    if (!Reduces(collective)) return true;
    if (op == ReduceOp::kAdasum) return collective == Collective::kAllreduce && IsFloating(dtype);
    return op != ReduceOp::kAverage || dtype != DType::kBool;
  }

  Result Allreduce(AllreduceCall call, Carrier* carrier) override {
    size_t elements = 0;
    for (const Part& part : call.parts) elements += part.count;
    Algorithm algorithm = Algorithm::kDirect;
    if (elements > 0 && comm_->size() > 1 && call.op != ReduceOp::kAdasum) {
      SPARKVOD_TRY(MeasureLink());
      algorithm = ChooseAllreduce(wishes_.allreduce, elements * SizeOf(call.dtype),
                                  !call.placement.empty(), layout_, link_);
    }
    if (algorithm != Algorithm::kDirect) AverageByShares(&call);
    if (call.prescale != 1) {
      const Phase scaling(comm_->timeline(), "prescale");
      for (Part& part : call.parts) {
        if (part.neutral) continue;
        BestKernels().scale(call.dtype, part.out, part.in, part.count, call.prescale);
        part.in = part.out;
      }
    }
    const Finish finish = FinishOf(call.op, call.dtype, call.postscale, call.average_over);
    if (elements == 0) return {};
    if (comm_->size() == 1) return Alone(call, finish, carrier);
    if (call.op == ReduceOp::kAdasum) return Adasum(call, elements, carrier);
    if (algorithm == Algorithm::kDirect) return Direct(call, finish, elements, carrier);
    carrier->algorithm = NameOf(algorithm);
    if (algorithm == Algorithm::kHierarchical) return Hierarchical(call, finish, elements);
    return Flat(algorithm, call, finish, elements);
  }

  bool Offer(DType dtype, ReduceOp op, double prescale, const std::vector<Part>& parts, char* room,
             size_t bytes) override {
    const size_t whole = OneShotBytes(dtype, parts);
    if (whole == 0 || whole > std::min(one_shot_bytes_, bytes) || prescale != 1 ||
        op == ReduceOp::kAdasum || wishes_.allreduce > Algorithm::kDirect)
      return false;
    OneShotPublish(dtype, parts, room);
    return true;
  }

  Result Allgather(const void* own, char* out, const std::vector<size_t>& offsets,
                   Carrier* carrier) override {
    const auto n = static_cast<size_t>(comm_->size()), me = static_cast<size_t>(comm_->rank());
    const size_t bytes = offsets[me + 1] - offsets[me];
    if (comm_->shares_memory() && n > 1) {
      size_t most = 0;
      for (size_t r = 0; r < n; ++r) most = std::max(most, offsets[r + 1] - offsets[r]);
      if (most <= kSmallBlockBytes) {
        carrier->algorithm = "one-shot";
        std::vector<Fetch> fetches;
        for (size_t r = 0; r < n; ++r)
          fetches.push_back({0, offsets[r], offsets[r + 1] - offsets[r]});
        return PassBlocks(*comm_, own, bytes, fetches, out);
      }
      carrier->algorithm = "direct";
      return PushBlocks(*comm_, out, std::vector<Block>(n, {own, offsets[me], bytes}));
    }
    if (bytes > 0) std::memcpy(out + offsets[me], own, bytes);
    carrier->algorithm = n == 1 ? "alone" : "ring";
    return RingAllgather(*comm_, out, offsets);
  }

  Result Broadcast(void* data, size_t bytes, int root, int64_t root_offset,
                   Carrier* carrier) override {
    if (comm_->size() == 1 || bytes == 0) {
      carrier->algorithm = "alone";
      return {};
    }
    SPARKVOD_TRY(MeasureLink());
    const Algorithm algorithm = ChooseBroadcast(wishes_.broadcast, bytes, layout_, link_);
    carrier->algorithm = NameOf(algorithm);
    if (algorithm == Algorithm::kDirect)
      return DirectBroadcast(*comm_, data, bytes, root, root_offset);
    if (algorithm == Algorithm::kTree)
      return TreeBroadcast(*comm_, Everybody(*comm_), data, bytes, root);
    return ChainBroadcast(*comm_, data, bytes, root);
  }

  Result Reducescatter(const ReducescatterCall& given, Carrier* carrier) override {
    ReducescatterCall call = given;
    if (comm_->size() > 1 && !comm_->shares_memory()) AverageByShares(&call);
    const Finish finish = FinishOf(call.op, call.dtype, call.postscale, call.average_over);
    const size_t elements = call.begins.back();
    if (elements == 0) return {};
    const void* in = call.part.in;
    void* const out = call.part.out;
    std::vector<int64_t> placement = call.placement;
    if (call.prescale != 1) {
      // The input is the caller's, so what is scaled is a copy.
      SPARKVOD_TRY(Gather(call.dtype, {}, elements));
      BestKernels().scale(call.dtype, fusion_, in, elements, call.part.neutral ? 1 : call.prescale);
      in = fusion_;
      placement.clear();
      if (comm_->shares_memory()) SPARKVOD_TRY(FusionOffsets(&placement));
    }
    if (comm_->size() == 1) {
      carrier->algorithm = "alone";
      void* dst = out;
      BestKernels().sum_to(call.dtype, &dst, 1, &in, 1, elements, finish);
      return {};
    }
    carrier->algorithm = comm_->shares_memory() ? "direct" : "ring";
    return comm_->shares_memory()
               ? DirectReducescatter(*comm_, call.dtype, in, out, call.begins, placement, finish,
                                     call.prescale == 1 ? Inputs::kSubmitted : Inputs::kWritten)
               : RingReducescatter(*comm_, call.dtype, in, out, call.begins, finish);
  }

  Result Alltoall(const AlltoallCall& call, Carrier* carrier) override {
    const auto n = static_cast<size_t>(comm_->size()), me = static_cast<size_t>(comm_->rank());
    if (!comm_->shares_memory() || n == 1) {
      carrier->algorithm = n == 1 ? "alone" : "pairwise";
      return PairwiseAlltoall(*comm_, call.in, call.out, call.bytes);
    }
    size_t most = 0;  // that a rank sends
    for (size_t q = 0; q < n; ++q) most = std::max(most, Sent(call, q, n));
    if (most <= kSmallBlockBytes) {
      carrier->algorithm = "one-shot";
      std::vector<Fetch> fetches;
      size_t to = 0;
      for (size_t q = 0; q < n; ++q) {
        fetches.push_back({Sent(call, q, me), to, call.bytes[q * n + me]});
        to += call.bytes[q * n + me];
      }
      return PassBlocks(*comm_, call.in, Sent(call, me, n), fetches, call.out);
    }
    carrier->algorithm = "direct";
    std::vector<Block> blocks;
    const char* from = static_cast<const char*>(call.in);
    for (size_t r = 0; r < n; ++r) {
      size_t to = 0;
      for (size_t q = 0; q < me; ++q) to += call.bytes[q * n + r];
      blocks.push_back({from, to, call.bytes[me * n + r]});
      from += call.bytes[me * n + r];
    }
    return PushBlocks(*comm_, call.out, blocks);
  }

  void Tune(const Tunables& tunables) override {
    one_shot_bytes_ = OneShotLimit(tunables.one_shot_bytes);
    link_gbits_ = static_cast<double>(tunables.link_mbits) / 1000;
    if (link_.alpha_ns > 0) link_ = LinkCostOf(round_trip_us_, link_gbits_);
  }

 private:
  // What goes by one shot passes through a slot.
  static size_t OneShotLimit(int64_t bytes) {
    return std::min(static_cast<size_t>(bytes), Geometry::kSlotBytes);
  }

  // Bytes that rank q sends to the first `ranks` ranks.
  size_t Sent(const AlltoallCall& call, size_t q, size_t ranks) const {
    const size_t* row = call.bytes.data() + q * static_cast<size_t>(comm_->size());
    return std::accumulate(row, row + ranks, size_t{0});
  }

  // The ranks agree on the longest round trip between any two, once, at the first call that asks.
  Result MeasureLink() {
    if (link_.alpha_ns > 0) return {};
    int64_t longest = 0;
    if (!layout_.shares_memory) {
      for (int r = 0; r < comm_->size(); ++r)
        if (r != comm_->rank()) longest = std::max(longest, comm_->channel(r).round_trip_us());
      SPARKVOD_TRY(DoublingAllreduce(*comm_, Everybody(*comm_), DType::kInt64, &longest, 1,
                                     {1.0, 1, Combine::kMax}));
    }
    round_trip_us_ = longest;
    link_ = LinkCostOf(longest, link_gbits_);
    return {};
  }

  // Over channels a sum travels in its own type, and one of float16 ends at 65504. So an average's
  // terms are made smaller first, by a power of two, which costs no bit, and larger in the end.
  template <typename Call>
  void AverageByShares(Call* call) const {
    if (call->op != ReduceOp::kAverage || call->dtype != DType::kFloat16) return;
    const double share = std::exp2(-std::ceil(std::log2(call->average_over)));
    call->prescale *= share;
    call->postscale /= share;
  }

  Finish FinishOf(ReduceOp op, DType dtype, double postscale, int average_over) const {
    Finish finish{postscale, 1, CombineOf(op)};
    if (op == ReduceOp::kAverage) {
      if (IsFloating(dtype))
        finish.scale /= average_over;
      else
        finish.divisor = average_over;
    }
    return finish;
  }

  Result Alone(const AllreduceCall& call, Finish finish, Carrier* carrier) {
    carrier->algorithm = "alone";
    for (const Part& part : call.parts) {
      void* dst = part.out;
      BestKernels().sum_to(call.dtype, &dst, 1, &part.in, 1, part.count, finish);
    }
    return {};
  }

  // Every rank gets its share of all vectors, computes the tree on it, and gives the result to all.
  Result Adasum(const AllreduceCall& call, size_t elements, Carrier* carrier) {
    const auto n = static_cast<size_t>(comm_->size()), me = static_cast<size_t>(comm_->rank());
    const size_t size = SizeOf(call.dtype);
    const auto begin = [&](size_t r) {
      return ShareBegin(call.dtype, elements, static_cast<int>(r), comm_->size());
    };
    SPARKVOD_TRY(Gather(call.dtype, call.parts, elements));
    AlltoallCall exchange;
    std::vector<size_t> offsets{0};
    for (size_t r = 0; r < n; ++r) offsets.push_back(begin(r + 1) * size);
    for (size_t q = 0; q < n; ++q)
      for (size_t r = 0; r < n; ++r) exchange.bytes.push_back(offsets[r + 1] - offsets[r]);
    const size_t own = offsets[me + 1] - offsets[me];
    Heap& heap = *comm_->own_arena().heap();
    char* shares = nullptr;
    SPARKVOD_TRY(heap.Allocate(n * own, &shares, false));
    exchange.in = fusion_;
    exchange.out = shares;
    Result result = Alltoall(exchange, carrier);
    if (result.ok()) {
      AdasumShare share{call.dtype, {}, {}};
      for (size_t r = 0; r < n; ++r) share.vectors.push_back(shares + r * own);
      size_t end = 0;
      for (const Part& part : call.parts) {
        end += part.count;
        share.ends.push_back(std::min(std::max(end, begin(me)), begin(me + 1)) - begin(me));
      }
      result = AdasumTree(share, [&](std::vector<double>* numbers) {
        AllreduceCall sum;
        sum.dtype = DType::kFloat64;
        sum.parts = {{numbers->data(), numbers->data(), numbers->size()}};
        return Allreduce(sum, carrier);
      });
      if (call.postscale != 1)
        BestKernels().scale(call.dtype, shares, shares, own / size, call.postscale);
    }
    if (result.ok()) result = Allgather(shares, fusion_, offsets, carrier);
    heap.Free(shares);
    if (result.ok()) Scatter(call);
    carrier->algorithm = "adasum";
    return result;
  }

  Result Direct(const AllreduceCall& call, Finish finish, size_t elements, Carrier* carrier) {
    // Everybody sums everything itself: one synchronisation instead of two.
    if (OneShotBytes(call.dtype, call.parts) <= one_shot_bytes_) {
      carrier->algorithm = "one-shot";
      return call.offers.empty()
                 ? OneShotAllreduce(*comm_, call.dtype, call.parts, finish)
                 : OneShotReduce(*comm_, call.dtype, call.parts, call.offers, finish);
    }
    if (!call.placement.empty()) {
      carrier->algorithm = "in-place";
      return InPlaceAllreduce(*comm_, call.dtype, call.placement, elements, finish,
                              call.prescale == 1 ? Inputs::kSubmitted : Inputs::kWritten);
    }
    if (call.parts.size() == 1) {
      carrier->algorithm = "staged";
      return StagedAllreduce(*comm_, call.dtype, call.parts[0], finish);
    }
    // Many parts meet in a block of engine memory, where they are summed in place.
    carrier->algorithm = "fused";
    SPARKVOD_TRY(Gather(call.dtype, call.parts, elements));
    std::vector<int64_t> offsets;
    SPARKVOD_TRY(FusionOffsets(&offsets));
    SPARKVOD_TRY(InPlaceAllreduce(*comm_, call.dtype, offsets, elements, finish, Inputs::kWritten));
    Scatter(call);
    return {};
  }

  Result Hierarchical(const AllreduceCall& call, Finish finish, size_t elements) {
    const auto across = [&](size_t count) {
      return ChooseAcrossHosts(count * SizeOf(call.dtype), layout_, link_);
    };
    if (!call.placement.empty())
      return HierarchicalAllreduce(*comm_, across(elements), call.dtype, OfThisHost(call.placement),
                                   elements, finish);
    // Ordinary memory passes through a block of engine memory; one large tensor piece by piece.
    const size_t piece = std::max<size_t>(kPieceBytes / SizeOf(call.dtype), 1);
    const bool whole = call.parts.size() > 1 || elements <= piece;
    for (size_t done = 0; done < elements; done += whole ? elements : piece) {
      AllreduceCall some = call;
      size_t count = elements;
      if (!whole) {
        const Part& part = call.parts[0];
        const size_t skip = done * SizeOf(call.dtype);
        count = std::min(piece, elements - done);
        some.parts = {
            {static_cast<const char*>(part.in) + skip, static_cast<char*>(part.out) + skip, count}};
      }
      SPARKVOD_TRY(Gather(some.dtype, some.parts, count));
      std::vector<int64_t> offsets;
      SPARKVOD_TRY(FusionOffsets(&offsets));
      SPARKVOD_TRY(HierarchicalAllreduce(*comm_, across(count), call.dtype, OfThisHost(offsets),
                                         count, finish));
      Scatter(some);
    }
    return {};
  }

  std::vector<int64_t> OfThisHost(const std::vector<int64_t>& by_rank) const {
    std::vector<int64_t> local;
    for (const int r : comm_->topology().local_ranks)
      local.push_back(by_rank[static_cast<size_t>(r)]);
    return local;
  }

  Result Flat(Algorithm algorithm, const AllreduceCall& call, Finish finish, size_t elements) {
    if (call.parts.size() == 1) {
      const Part& part = call.parts[0];
      if (part.in != part.out) std::memcpy(part.out, part.in, part.count * SizeOf(call.dtype));
      return FlatAllreduce(algorithm, *comm_, Everybody(*comm_), call.dtype, part.out, part.count,
                           finish);
    }
    SPARKVOD_TRY(Gather(call.dtype, call.parts, elements));
    SPARKVOD_TRY(
        FlatAllreduce(algorithm, *comm_, Everybody(*comm_), call.dtype, fusion_, elements, finish));
    Scatter(call);
    return {};
  }

  // Lays parts one behind the other in the fusion block, which holds `elements` then.
  Result Gather(DType dtype, const std::vector<Part>& parts, size_t elements) {
    const size_t size = SizeOf(dtype);
    if (elements * size > fusion_bytes_) {
      if (fusion_ != nullptr) comm_->own_arena().heap()->Free(fusion_);
      fusion_ = nullptr;
      fusion_bytes_ = std::max<size_t>(elements * size, fusion_bytes_ * 2);
      SPARKVOD_TRY(comm_->own_arena().heap()->Allocate(fusion_bytes_, &fusion_, false));
      offsets_known_ = false;
    }
    const Phase copying(comm_->timeline(), "fusion copy in");
    char* to = fusion_;
    for (const Part& part : parts) {
      if (part.count > 0) std::memcpy(to, part.in, part.count * size);
      to += part.count * size;
    }
    return {};
  }

  void Scatter(const AllreduceCall& call) const {
    const Phase copying(comm_->timeline(), "fusion copy out");
    const char* from = fusion_;
    for (const Part& part : call.parts) {
      if (part.count > 0) std::memcpy(part.out, from, part.count * SizeOf(call.dtype));
      from += part.count * SizeOf(call.dtype);
    }
  }

  // Ranks grow their fusion blocks at the same calls, so they also exchange the places at the same
  // calls.
  Result FusionOffsets(std::vector<int64_t>* offsets) {
    if (!offsets_known_) {
      fusion_offsets_.assign(static_cast<size_t>(comm_->size()), 0);
      fusion_offsets_[static_cast<size_t>(comm_->rank())] =
          comm_->own_arena().heap()->OffsetOf(fusion_, 1);
      SPARKVOD_TRY(RingAllgather(*comm_, reinterpret_cast<char*>(fusion_offsets_.data()),
                                 sizeof fusion_offsets_[0]));
      offsets_known_ = true;
    }
    *offsets = fusion_offsets_;
    return {};
  }

  Communicator* comm_;
  Wishes wishes_;
  double link_gbits_;
  Layout layout_;
  size_t one_shot_bytes_;
  LinkCost link_;  // zeros until it is known
  int64_t round_trip_us_ = 0;
  char* fusion_ = nullptr;
  size_t fusion_bytes_ = 0;
  bool offsets_known_ = false;
  std::vector<int64_t> fusion_offsets_;
};

}  // namespace

Result MakeBuiltin(Communicator* comm, const Config& config, std::unique_ptr<Backend>* out) {
  Wishes wishes;
  SPARKVOD_TRY(WishesOf(config, &wishes));
  *out = std::make_unique<Builtin>(comm, wishes, config);
  return {};
}

}  // namespace sparkvod
