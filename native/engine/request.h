// What a rank wants done, as the other ranks need to know it. Fixed binary form with a version and
// limits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "native/backends/backend.h"
#include "native/base/result.h"
#include "native/base/wire.h"

namespace sparkvod {

// One tensor of a request; a grouped call has several.
struct Entry {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  int64_t placement =
      -1;  // offset in the rank's arena when it lies in engine memory, in place; else -1

  int64_t count() const {
    int64_t n = 1;
    for (const int64_t d : shape) n *= d;
    return n;
  }
  // Bytes of one row: of an element of dimension 0.
  size_t row_bytes() const {
    size_t n = SizeOf(dtype);
    for (size_t d = 1; d < shape.size(); ++d) n *= static_cast<size_t>(shape[d]);
    return n;
  }
  bool operator==(const Entry& o) const {
    return dtype == o.dtype && placement == o.placement && shape == o.shape;
  }
};

// Longest name of a request, in bytes.
constexpr size_t kNameLimit = 64 << 10;
// Most dimensions of a tensor, and most elements.
constexpr size_t kRankLimit = 64;
constexpr int64_t kCountLimit = int64_t{1} << 48;

// Roots of a join: averages are over all ranks, or over those that have not joined.
constexpr int32_t kOverAll = 0, kOverActive = 1;
// Root of a tune that every rank says; any other is the rank whose word is enough.
constexpr int32_t kByAll = -1;

struct Request {
  std::string name;
  Collective collective = Collective::kAllreduce;
  int32_t process_set = 0;
  ReduceOp op = ReduceOp::kSum;
  // Of a broadcast, a rank of the world; of a join: what averages are over meanwhile; the process
  // set to be removed; of a tune: kByAll, or the rank that says it.
  int32_t root = 0;
  double prescale = 1, postscale = 1;
  std::vector<Entry> entries;
  std::vector<int64_t> splits;  // alltoall: rows for each rank; the ranks of a process set to
                                // add; of a tune: Pack() of what it sets

  bool operator==(const Request& o) const {
    return collective == o.collective && process_set == o.process_set && op == o.op &&
           root == o.root && prescale == o.prescale && postscale == o.postscale && name == o.name &&
           entries == o.entries && splits == o.splits;
  }
  // What it is known by: names of different process sets are different.
  std::string key() const {
    return process_set == 0 ? name : name + '\0' + std::to_string(process_set);
  }
  int64_t bytes() const;
  // "allreduce (sum) of float32 [8,4]", for messages. Of a large group the first tensors are named,
  // or those `shown`.
  std::string Describe(const std::vector<size_t>& shown = {}) const;
};

// First row of rank r's share when `rows` are scattered over n ranks: the first rows % n get one
// more.
constexpr int64_t FirstRow(int64_t rows, int r, int n) {
  const int64_t more = rows % n;
  return rows / n * r + (r < more ? r : more);
}

// Whether a shape is within what a request may say: so many dimensions, and so many elements even
// where some dimensions are 0.
bool FitsRequest(const std::vector<int64_t>& shape);

void Encode(const Request& request, Writer* out);
// Of a list that a peer sent: everything is checked before it is used.
Result Decode(Reader* in, Request* out);

// Why the requests of all ranks under one name do not fit together; ok when they do. Names every
// rank's version. `ranks`: which ranks of the world they are; `absent`: whose is but what stands in
// for one that has joined, and is not named; empty: none.
Result CheckAgreement(const std::vector<Request>& by_rank, const std::vector<int>& ranks,
                      const std::vector<bool>& absent = {});

}  // namespace sparkvod
