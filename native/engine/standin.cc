#include "native/engine/standin.h"

#include <cstring>
#include <limits>
#include <new>

namespace sparkvod {
namespace {

template <typename T>
T Neutral(ReduceOp op) {
  using Limits = std::numeric_limits<T>;
  constexpr bool kInfinite = Limits::has_infinity;
  switch (op) {
    case ReduceOp::kProduct:
      return T(1);
    case ReduceOp::kMin:
      return kInfinite ? Limits::infinity() : Limits::max();
    case ReduceOp::kMax:
      return kInfinite ? -Limits::infinity() : Limits::lowest();
    default:
      return T(0);
  }
}

// Of the halves by their bits: 1, infinity, -infinity.
uint16_t NeutralHalf(ReduceOp op, uint16_t one, uint16_t infinity) {
  switch (op) {
    case ReduceOp::kProduct:
      return one;
    case ReduceOp::kMin:
      return infinity;
    case ReduceOp::kMax:
      return static_cast<uint16_t>(infinity | 0x8000);
    default:
      return 0;
  }
}

template <typename T>
void Fill(char* to, size_t count, T value) {
  for (size_t i = 0; i < count; ++i) std::memcpy(to + i * sizeof value, &value, sizeof value);
}

void FillNeutral(DType dtype, ReduceOp op, char* to, size_t count) {
  switch (dtype) {
    case DType::kUInt8:
      return Fill(to, count, Neutral<uint8_t>(op));
    case DType::kInt8:
      return Fill(to, count, Neutral<int8_t>(op));
    case DType::kUInt16:
      return Fill(to, count, Neutral<uint16_t>(op));
    case DType::kInt16:
      return Fill(to, count, Neutral<int16_t>(op));
    case DType::kInt32:
      return Fill(to, count, Neutral<int32_t>(op));
    case DType::kInt64:
      return Fill(to, count, Neutral<int64_t>(op));
    case DType::kFloat16:
      return Fill(to, count, NeutralHalf(op, 0x3c00, 0x7c00));
    case DType::kBFloat16:
      return Fill(to, count, NeutralHalf(op, 0x3f80, 0x7f80));
    case DType::kFloat32:
      return Fill(to, count, Neutral<float>(op));
    case DType::kFloat64:
      return Fill(to, count, Neutral<double>(op));
    case DType::kBool:
      return Fill(to, count,
                  static_cast<uint8_t>(op == ReduceOp::kMin || op == ReduceOp::kProduct));
  }
}

std::string Ranks(const std::vector<bool>& absent, const Members& members) {
  std::string text;
  int count = 0;
  for (size_t r = 0; r < absent.size(); ++r)
    if (absent[r]) text += (count++ > 0 ? "," : "") + std::to_string(members.ranks[r]);
  return (count == 1 ? "rank " : "ranks ") + text + (count == 1 ? " has" : " have");
}

}  // namespace

Request StandInRequest(const Request& asked) {
  Request request = asked;
  for (Entry& e : request.entries) {
    e.placement = -1;
    if (HasOwnRows(asked.collective)) e.shape[0] = 0;
  }
  if (asked.collective == Collective::kAlltoall) request.splits.assign(asked.splits.size(), 0);
  return request;
}

Result StandIn(const Request& request, int rank, int size, std::shared_ptr<Operation>* out) {
  auto operation = std::make_shared<Operation>(request);
  operation->submitted_ns = NowNs();
  size_t bytes = 0;
  for (const Entry& e : request.entries)
    bytes +=
        static_cast<size_t>(e.count()) * SizeOf(e.dtype) * (Reduces(request.collective) ? 2 : 1);
  operation->scratch.reset(new (std::nothrow) char[bytes]());
  if (operation->scratch == nullptr)
    return Result::Fail(Code::kSystem, "this rank has joined and has no memory of " +
                                           std::to_string(bytes) + " bytes to take its part in " +
                                           request.Describe() + " of '" + request.name + "'");
  char* at = operation->scratch.get();
  for (const Entry& e : request.entries) {
    const auto count = static_cast<size_t>(e.count());
    const size_t own = count * SizeOf(e.dtype);
    Part part{at, at, count, true};
    at += own;
    if (Reduces(request.collective))
      FillNeutral(e.dtype, request.op, static_cast<char*>(part.out), count);
    if (request.collective == Collective::kReducescatter) {
      part.out = at;
      at += static_cast<size_t>(FirstRow(e.shape[0], rank + 1, size) -
                                FirstRow(e.shape[0], rank, size)) *
            e.row_bytes();
    }
    operation->parts.push_back(part);
  }
  *out = std::move(operation);
  return {};
}

Result CheckAbsent(const std::vector<Request>& by_rank, const std::vector<bool>& absent,
                   const Members& members) {
  const Request& any = by_rank[0];
  if (any.collective == Collective::kAddSet || any.collective == Collective::kRemoveSet)
    return Result::Fail(Code::kMismatch, std::string(NameOf(any.collective)) +
                                             " needs all ranks, but " + Ranks(absent, members) +
                                             " joined; do it before any rank joins");
  const int root = members.PlaceOf(any.root);  // as others say it, who may say anything
  if (any.collective == Collective::kBroadcast && root < 0)
    return Result::Fail(Code::kMismatch, "broadcast of '" + any.name + "' has root " +
                                             std::to_string(any.root) + ", which is none of " +
                                             members.Text());
  if (any.collective == Collective::kBroadcast && absent[static_cast<size_t>(root)])
    return Result::Fail(Code::kMismatch,
                        "broadcast of '" + any.name + "' has root " + std::to_string(any.root) +
                            ", but " + Ranks(absent, members) +
                            " joined and has nothing to send; choose a root that has not joined");
  if (any.collective == Collective::kAlltoall)
    for (size_t q = 0; q < by_rank.size(); ++q)
      for (size_t r = 0; r < absent.size(); ++r)
        if (absent[r] && by_rank[q].splits[r] > 0)
          return Result::Fail(
              Code::kMismatch,
              "alltoall of '" + any.name + "': rank " + std::to_string(members.ranks[q]) +
                  " sends " + std::to_string(by_rank[q].splits[r]) + " rows to rank " +
                  std::to_string(members.ranks[r]) + ", but " + Ranks(absent, members) +
                  " joined and takes none; send it no rows");
  return {};
}

}  // namespace sparkvod
