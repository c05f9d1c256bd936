#include "native/engine/admission.h"

#include <cmath>
#include <numeric>

namespace sparkvod {
namespace {

Result CheckSupported(const Backend& backend, const Request& request, DType dtype) {
  if (backend.Supports(request.collective, request.op, dtype)) return {};
  std::string what = NameOf(request.collective);
  if (Reduces(request.collective)) what += std::string(" (") + NameOf(request.op) + ")";
  std::string known;
  for (int code = 0; code < kDTypeCount; ++code)
    if (backend.Supports(request.collective, request.op, static_cast<DType>(code)))
      known += (known.empty() ? "" : ", ") + std::string(NameOf(static_cast<DType>(code)));
  return Result::Fail(Code::kInvalid, what + " of '" + request.name + "' was asked for dtype " +
                                          NameOf(dtype) +
                                          (known.empty() ? "; the backend has no such operation"
                                                         : "; it can be done for " + known));
}

Result CompleteSplits(int size, Request* request) {
  const int64_t rows = request->entries[0].shape[0];
  const std::string what = "alltoall of '" + request->name + "' ";
  if (request->splits.empty()) {
    if (rows % size != 0)
      return Result::Fail(Code::kInvalid, what + "has " + std::to_string(rows) + " rows, which " +
                                              std::to_string(size) +
                                              " ranks cannot share equally; give splits");
    request->splits.assign(static_cast<size_t>(size), rows / size);
    return {};
  }
  if (request->splits.size() != static_cast<size_t>(size))
    return Result::Fail(Code::kInvalid, what + "has " + std::to_string(request->splits.size()) +
                                            " splits; one for each of " + std::to_string(size) +
                                            " ranks was expected");
  int64_t left = rows;
  for (const int64_t split : request->splits) {
    if (split < 0)
      return Result::Fail(Code::kInvalid, what + "has a split of " + std::to_string(split) +
                                              " rows; 0 or more was expected");
    if (split > left)
      return Result::Fail(Code::kInvalid, what + "has splits of more rows than its " +
                                              std::to_string(rows) + "; at most these can be sent");
    left -= split;
  }
  return {};
}

Result CheckRanks(const Members& world, const Request& request) {
  int64_t last = -1;
  for (const int64_t r : request.splits) {
    if (r >= world.size() || r <= last)
      return Result::Fail(Code::kInvalid, "a process set with rank " + std::to_string(r) +
                                              " was found; different ranks from 0 to " +
                                              std::to_string(world.size() - 1) +
                                              ", in ascending order, were expected");
    last = r;
  }
  if (last >= 0) return {};
  return Result::Fail(Code::kInvalid,
                      "a process set without ranks was found; at least one was expected");
}

}  // namespace

Result Admit(const Backend& backend, const Members& members, const std::vector<Part>& parts,
             Request* request) {
  const std::string what = std::string(NameOf(request->collective)) + " of '" + request->name + "'";
  if (HasTensors(request->collective) &&
      (request->entries.empty() || request->entries.size() != parts.size()))
    return Result::Fail(Code::kInvalid,
                        "'" + request->name + "' has " + std::to_string(request->entries.size()) +
                            " tensors; at least one, with its memory, was expected");
  if (request->name.size() > kNameLimit)
    return Result::Fail(Code::kInvalid, "a name of " + std::to_string(request->name.size()) +
                                            " bytes was found, at most " +
                                            std::to_string(kNameLimit) + " were expected");
  if (std::isnan(request->prescale) || std::isnan(request->postscale))
    return Result::Fail(Code::kInvalid,
                        "'" + request->name + "' is scaled by NaN; a number was expected");
  const bool by_rows = request->collective == Collective::kAllgather ||
                       request->collective == Collective::kReducescatter ||
                       request->collective == Collective::kAlltoall;
  for (const Entry& e : request->entries) {
    SPARKVOD_TRY(CheckSupported(backend, *request, e.dtype));
    if (!FitsRequest(e.shape))
      return Result::Fail(Code::kInvalid,
                          "'" + request->name + "' is " + request->Describe() + "; at most " +
                              std::to_string(kRankLimit) + " dimensions and " +
                              std::to_string(kCountLimit) +
                              " elements, of which a dimension of 0 leaves as many as one of 1, "
                              "were expected");
    if (by_rows && e.shape.empty())
      return Result::Fail(Code::kInvalid, what + " needs at least one dimension");
  }
  if (members.place < 0)
    return Result::Fail(Code::kInvalid, what + " was asked for in process set " +
                                            std::to_string(members.id) + " of the ranks " +
                                            members.Text() + ", of which this rank is none");
  if (request->collective == Collective::kBroadcast && members.PlaceOf(request->root) < 0)
    return Result::Fail(
        Code::kInvalid,
        what + " has root " + std::to_string(request->root) + "; " +
            (members.id == 0 ? "a rank from 0 to " + std::to_string(members.size() - 1)
                             : "one of the ranks " + members.Text()) +
            " was expected");
  if (request->collective == Collective::kAddSet) SPARKVOD_TRY(CheckRanks(members, *request));
  return request->collective == Collective::kAlltoall ? CompleteSplits(members.size(), request)
                                                      : Result::Ok();
}

}  // namespace sparkvod
