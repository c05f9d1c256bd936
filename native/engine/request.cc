#include "native/engine/request.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>

namespace sparkvod {
namespace {

constexpr uint8_t kVersion = 4;
constexpr size_t kShown = 4;  // tensors of a group in a message

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? "," : "") + std::to_string(shape[i]);
  return text + "]";
}

// The shortest text that reads back as the number, so that two numbers never look alike.
std::string Number(double number) {
  char text[32];
  for (const int digits : {6, 15, 17}) {
    std::snprintf(text, sizeof text, "%.*g", digits, number);
    if (std::strtod(text, nullptr) == number) break;
  }
  return text;
}

// Without their placement, and without the first dimension where each rank has its own.
bool FitsEntry(Collective collective, const Entry& x, const Entry& y) {
  if (x.dtype != y.dtype) return false;
  if (!HasOwnRows(collective)) return x.shape == y.shape;
  return x.shape.size() == y.shape.size() &&
         std::equal(x.shape.begin() + 1, x.shape.end(), y.shape.begin() + 1);
}

bool Fits(const Request& a, const Request& b) {
  if (!HasTensors(a.collective) && a.splits != b.splits) return false;
  if (a.collective != b.collective || a.op != b.op || a.root != b.root ||
      a.prescale != b.prescale || a.postscale != b.postscale ||
      a.entries.size() != b.entries.size())
    return false;
  for (size_t i = 0; i < a.entries.size(); ++i)
    if (!FitsEntry(a.collective, a.entries[i], b.entries[i])) return false;
  return true;
}

}  // namespace

int64_t Request::bytes() const {
  int64_t total = 0;
  for (const Entry& e : entries) total += e.count() * static_cast<int64_t>(SizeOf(e.dtype));
  return total;
}

std::string Request::Describe(const std::vector<size_t>& shown) const {
  std::string text = NameOf(collective);
  if (Reduces(collective)) text += std::string(" (") + NameOf(op) + ")";
  if (collective == Collective::kJoin)
    text += root == kOverActive ? " (averages over active ranks)" : " (averages over all ranks)";
  if (collective == Collective::kAddSet) text += " of ranks " + ShapeText(splits);
  if (Tunables tunables; collective == Collective::kTune && Unpack(splits, &tunables).ok())
    for (const Tunable& t : kTunables)
      text += std::string(t.value == kTunables[0].value ? " to " : ", ") + t.name + "=" +
              std::to_string(tunables.*t.value);
  if (collective == Collective::kRemoveSet) text += " " + std::to_string(root);
  if (process_set != 0) text += " in process set " + std::to_string(process_set);
  if (collective == Collective::kBroadcast) text += " (root " + std::to_string(root) + ")";
  const bool first_ones = shown.empty() || entries.size() <= kShown;
  size_t given = 0;
  const auto show = [&](size_t i) {
    text += given++ == 0 ? " of " : ", ";
    if (!first_ones) text += "tensor " + std::to_string(i) + " ";
    text += std::string(NameOf(entries[i].dtype)) + " " + ShapeText(entries[i].shape);
  };
  if (first_ones)
    for (size_t i = 0; i < entries.size() && i < kShown; ++i) show(i);
  else
    for (const size_t i : shown)
      if (i < entries.size()) show(i);
  if (entries.size() > kShown)
    text += ", ... " + std::to_string(entries.size()) + " tensors in all";
  if (prescale != 1 || postscale != 1)
    text += " scaled by " + Number(prescale) + " before and " + Number(postscale) + " after";
  return text;
}

bool FitsRequest(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t d : shape) {
    if (d < 0 || d > kCountLimit || (d > 0 && count > kCountLimit / d)) return false;
    count *= d > 0 ? d : 1;
  }
  return shape.size() <= kRankLimit;
}

void Encode(const Request& request, Writer* out) {
  out->Put(kVersion);
  out->PutString(request.name);
  out->Put(request.collective);
  out->Put(request.process_set);
  out->Put(request.op);
  out->Put(request.root);
  out->Put(request.prescale);
  out->Put(request.postscale);
  out->Put(static_cast<uint32_t>(request.entries.size()));
  for (const Entry& e : request.entries) {
    out->Put(e.dtype);
    out->Put(e.placement);
    out->Put(static_cast<uint32_t>(e.shape.size()));
    for (const int64_t d : e.shape) out->Put(d);
  }
  out->Put(static_cast<uint32_t>(request.splits.size()));
  for (const int64_t rows : request.splits) out->Put(rows);
}

namespace {

// What the collective takes for granted of a request, wherever it comes from.
bool IsComplete(const Request& request) {
  if (request.collective == Collective::kAddSet)
    for (size_t i = 0; i < request.splits.size(); ++i)
      if (request.splits[i] < 0 || request.splits[i] > INT32_MAX ||
          (i > 0 && request.splits[i] <= request.splits[i - 1]))
        return false;
  if (Tunables tunables; request.collective == Collective::kTune &&
                         (request.process_set != 0 || !Unpack(request.splits, &tunables).ok()))
    return false;
  if (!HasTensors(request.collective)) return request.entries.empty();
  if (request.entries.empty()) return false;
  const bool one =
      request.collective == Collective::kBroadcast || request.collective == Collective::kAlltoall;
  if (one && request.entries.size() != 1) return false;
  const bool by_rows =
      request.collective != Collective::kAllreduce && request.collective != Collective::kBroadcast;
  for (const Entry& e : request.entries)
    if (by_rows && e.shape.empty()) return false;
  int64_t left = request.collective == Collective::kAlltoall ? request.entries[0].shape[0] : 0;
  for (const int64_t rows : request.splits) {
    if (rows < 0 || rows > left) return false;
    left -= rows;
  }
  return true;
}

}  // namespace

Result Decode(Reader* in, Request* out) {
  const Result damaged = Result::Fail(Code::kPeerLost, "a damaged request");
  if (in->Get<uint8_t>() != kVersion) return damaged;
  out->name = in->GetString(kNameLimit);
  const int collective = in->Get<uint8_t>();
  const auto process_set = in->Get<int32_t>();
  const int op = in->Get<uint8_t>();
  if (!in->ok() || collective >= kCollectiveCount || !IsReduceOp(op)) return damaged;
  out->collective = static_cast<Collective>(collective);
  out->process_set = process_set;
  out->op = static_cast<ReduceOp>(op);
  out->root = in->Get<int32_t>();
  out->prescale = in->Get<double>();
  out->postscale = in->Get<double>();
  out->entries.resize(in->GetCount(sizeof(uint8_t) + sizeof(int64_t) + sizeof(uint32_t)));
  for (Entry& e : out->entries) {
    const int dtype = in->Get<uint8_t>();
    if (!IsDType(dtype)) return damaged;
    e.dtype = static_cast<DType>(dtype);
    e.placement = in->Get<int64_t>();
    const size_t dims = in->GetCount(sizeof(int64_t));
    if (!in->ok() || dims > kRankLimit) return damaged;
    for (size_t i = 0; i < dims; ++i) e.shape.push_back(in->Get<int64_t>());
    if (!FitsRequest(e.shape)) return damaged;
  }
  out->splits.resize(in->GetCount(sizeof(int64_t)));
  for (int64_t& rows : out->splits) rows = in->Get<int64_t>();
  return in->ok() && IsComplete(*out) ? Result::Ok() : damaged;
}

Result CheckAgreement(const std::vector<Request>& by_rank, const std::vector<int>& ranks_in_world,
                      const std::vector<bool>& absent) {
  const auto said = [&](size_t r) { return absent.empty() || !absent[r]; };
  bool equal = true;
  for (const Request& r : by_rank)
    equal = equal && Fits(by_rank[0], r) &&
            (r.collective != Collective::kAlltoall || r.splits.size() == by_rank.size());
  if (equal) return {};
  // Of a group only some tensors are shown: those in which the ranks differ must be among them.
  std::vector<size_t> shown;
  for (size_t i = 0; i < by_rank[0].entries.size() && shown.size() < kShown; ++i)
    for (size_t r = 0; r < by_rank.size(); ++r)
      if (said(r) && i < by_rank[r].entries.size() &&
          !FitsEntry(by_rank[0].collective, by_rank[0].entries[i], by_rank[r].entries[i])) {
        shown.push_back(i);
        break;
      }
  std::map<std::string, std::string> ranks_of;  // description -> ranks
  std::vector<std::string> order;
  for (size_t r = 0; r < by_rank.size(); ++r) {
    if (!said(r)) continue;
    const std::string what = by_rank[r].Describe(shown);
    std::string& ranks = ranks_of[what];
    if (ranks.empty()) order.push_back(what);
    ranks += (ranks.empty() ? "" : ",") + std::to_string(ranks_in_world[r]);
  }
  std::string text = "the ranks disagree about '" + by_rank[0].name + "': ";
  for (size_t i = 0; i < order.size(); ++i) {
    const std::string& ranks = ranks_of[order[i]];
    const bool one = ranks.find(',') == std::string::npos;
    text +=
        (i > 0 ? ", " : "") + std::string(one ? "rank " : "ranks ") + ranks + " sent " + order[i];
  }
  return Result::Fail(Code::kMismatch, text + "; every rank must submit the same under one name");
}

}  // namespace sparkvod
