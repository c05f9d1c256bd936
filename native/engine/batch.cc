#include "native/engine/batch.h"

#include <algorithm>

namespace sparkvod {
namespace {

constexpr size_t kLargeBytes = 1 << 20;
// An in-place tensor below this is better off sharing a call.
constexpr size_t kSmallInPlaceBytes = 64 << 10;
// What is copied to share a call, and copied back.
constexpr size_t kSmallCopiedBytes = 64 << 10;
constexpr size_t kCopiedTogetherBytes = 1 << 20;

// Whether a tensor may join a batch; `i` is the place of its operation among those agreed on.
bool Joins(const Batch& batch, size_t i, DType dtype, const Request& request, int average_over,
           size_t bytes, size_t threshold) {
  if (batch.collective != request.collective || batch.process_set != request.process_set)
    return false;
  if (request.collective != Collective::kAllreduce)
    threshold = std::min(threshold, kCopiedTogetherBytes);
  if (batch.bytes + bytes > threshold) return false;
  if (request.collective == Collective::kAllgather) return true;
  // What stands in for a rank that has joined must not be scaled: together with what it submitted
  // itself it would be.
  const bool scaled = request.collective == Collective::kReducescatter && request.prescale != 1;
  if (scaled && batch.pieces[0].agreed != i) return false;
  return batch.call.placement.empty() && batch.call.dtype == dtype && batch.call.op == request.op &&
         batch.call.prescale == request.prescale && batch.call.postscale == request.postscale &&
         batch.call.average_over == average_over;
}

size_t BytesOf(const std::vector<Request>& by_rank, size_t e) {
  const Entry& entry = by_rank[0].entries[e];
  if (by_rank[0].collective != Collective::kAllgather)
    return static_cast<size_t>(entry.count()) * SizeOf(entry.dtype);
  size_t rows = 0;
  for (const Request& r : by_rank) rows += static_cast<size_t>(r.entries[e].shape[0]);
  return rows * entry.row_bytes();
}

}  // namespace

std::vector<int64_t> PlacementOf(const std::vector<Request>& by_rank, size_t e) {
  std::vector<int64_t> places;
  for (const Request& r : by_rank) {
    if (r.entries[e].placement < 0) return {};
    places.push_back(r.entries[e].placement);
  }
  return places;
}

std::vector<Batch> PlanBatches(const std::vector<Agreed>& agreed, size_t threshold) {
  std::vector<Batch> batches;
  std::vector<size_t> open;  // batches that more pieces may join
  for (size_t i = 0; i < agreed.size(); ++i) {
    if (!agreed[i].error.ok()) continue;
    const std::vector<Request>& by_rank = *agreed[i].by_rank;
    const Request& request = by_rank[0];
    if (!IsFused(request.collective)) {
      Batch batch;
      batch.collective = request.collective;
      batch.process_set = request.process_set;
      batch.pieces.push_back({i, 0});
      batches.push_back(std::move(batch));
      continue;
    }
    const bool copied = request.collective != Collective::kAllreduce;
    for (size_t e = 0; e < request.entries.size(); ++e) {
      const Entry& entry = request.entries[e];
      const size_t bytes = BytesOf(by_rank, e);
      std::vector<int64_t> placement;
      if (bytes >= kSmallInPlaceBytes && request.collective != Collective::kAllgather)
        placement = PlacementOf(by_rank, e);
      const bool alone =
          !placement.empty() || bytes >= kLargeBytes || (copied && bytes > kSmallCopiedBytes);
      const auto joined = std::find_if(open.begin(), open.end(), [&](size_t b) {
        return Joins(batches[b], i, entry.dtype, request, agreed[i].average_over, bytes, threshold);
      });
      if (!alone && joined != open.end()) {
        batches[*joined].pieces.push_back({i, e});
        batches[*joined].bytes += bytes;
        continue;
      }
      Batch batch;
      batch.pieces.push_back({i, e});
      batch.bytes = bytes;
      batch.collective = request.collective;
      batch.call.dtype = entry.dtype;
      batch.call.op = request.op;
      batch.call.prescale = request.prescale;
      batch.call.postscale = request.postscale;
      batch.call.average_over = agreed[i].average_over;
      batch.process_set = request.process_set;
      batch.call.placement = std::move(placement);
      if (!alone) open.push_back(batches.size());
      batches.push_back(std::move(batch));
    }
  }
  return batches;
}

}  // namespace sparkvod
