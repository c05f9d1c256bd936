// What travels between engines: it comes back as it was, and nothing damaged is taken for
// something.
#include "native/engine/request.h"

#include <random>
#include <string>
#include <vector>

#include "native/bootstrap/endpoint.h"
#include "native/engine/batch.h"
#include "tests/native/check.h"

namespace sparkvod {
namespace {

Request Sample() {
  Request request;
  request.name = "layer1.weight";
  request.collective = Collective::kAllreduce;
  request.op = ReduceOp::kAverage;
  request.root = 3;
  request.prescale = 0.5;
  request.postscale = 2;
  request.entries = {
      {DType::kFloat32, {8, 4}, 4096}, {DType::kInt64, {}, -1}, {DType::kBool, {0, 7}, -1}};
  return request;
}

std::string Encoded(const Request& request) {
  Writer writer;
  Encode(request, &writer);
  return writer.bytes();
}

Result Decoded(const std::string& bytes, Request* out) {
  Reader reader(bytes);
  SPARKVOD_TRY(Decode(&reader, out));
  return reader.AtEnd() ? Result::Ok() : Result::Fail(Code::kPeerLost, "bytes are left");
}

TEST(RequestsComeBackAsTheyWere) {
  Request back;
  EXPECT_EQ(Decoded(Encoded(Sample()), &back).Report(), "ok");
  EXPECT(back == Sample());
  EXPECT_EQ(back.bytes(), int64_t{8 * 4 * 4 + 8});
  EXPECT_EQ(Sample().Describe(),
            "allreduce (average) of float32 [8,4], int64 [], bool [0,7] scaled by 0.5 before and 2 "
            "after");
}

// Of a large group those tensors are named in which the ranks differ.
TEST(DisagreementsSayWhereTheyAre) {
  Request one;
  one.name = "group";
  for (int64_t i = 0; i < 300; ++i) one.entries.push_back({DType::kFloat32, {i}, -1});
  std::vector<Request> by_rank(3, one);
  by_rank[2].entries[7].shape = {8};
  by_rank[2].entries[299].dtype = DType::kInt32;
  EXPECT_EQ(CheckAgreement(by_rank, {0, 4, 7}).Report(),
            "the ranks disagree about 'group': ranks 0,4 sent allreduce (sum) of tensor 7 float32 "
            "[7], tensor 299 float32 [299], ... 300 tensors in all, rank 7 sent allreduce (sum) of "
            "tensor 7 float32 [8], tensor 299 int32 [299], ... 300 tensors in all; every rank must "
            "submit the same under one name");
  by_rank[2] = one;
  by_rank[2].entries.pop_back();
  EXPECT_CONTAINS(CheckAgreement(by_rank, {0, 1, 2}).Report(), "299 tensors in all;");
  by_rank[2] = one;
  by_rank[1].prescale = 0.1;
  by_rank[2].prescale = 0.1 + 1e-15;
  const std::string scaled = CheckAgreement(by_rank, {0, 1, 2}, {true, false, false}).Report();
  EXPECT_CONTAINS(scaled, "rank 1 sent allreduce (sum) of float32 [0]");
  EXPECT_CONTAINS(scaled, "scaled by 0.1 before and 1 after");
  EXPECT_CONTAINS(scaled, "scaled by 0.100000000000001 before");
  EXPECT(scaled.find("rank 0") == std::string::npos);
}

TEST(RequestsCutShortAreRefused) {
  const std::string bytes = Encoded(Sample());
  for (size_t n = 0; n < bytes.size(); ++n) {
    Request back;
    EXPECT(!Decoded(bytes.substr(0, n), &back).ok());
  }
}

// Any change of any byte: refused or something valid, never a crash or a huge allocation (the
// sanitizers watch).
TEST(RequestsWithDamageDoNoHarm) {
  const std::string bytes = Encoded(Sample());
  for (size_t i = 0; i < bytes.size(); ++i) {
    for (int value : {0x00, 0x01, 0x7f, 0x80, 0xff}) {
      std::string damaged = bytes;
      damaged[i] = static_cast<char>(value);
      Request back;
      if (!Decoded(damaged, &back).ok()) continue;
      EXPECT(back.entries.size() < 100);
      EXPECT(!back.Describe().empty());
      for (const Entry& entry : back.entries) EXPECT(entry.count() >= 0);
    }
  }
  std::mt19937 draw(3);
  for (int turn = 0; turn < 20000; ++turn) {
    std::string noise(draw() % 200, '\0');
    for (char& c : noise) c = static_cast<char>(draw());
    if (!noise.empty()) noise[0] = 1;  // the version
    Request back;
    (void)Decoded(noise, &back).ok();
    Endpoint endpoint;
    (void)Endpoint::Decode(noise, 0, &endpoint).ok();
  }
}

TEST(EndpointsComeBackAsTheyWere) {
  Endpoint endpoint;
  endpoint.host = "host7";
  endpoint.host_id = "id";
  endpoint.addresses = {"10.0.0.7", "fe80::7"};
  endpoint.port = 4711;
  endpoint.arena_bytes = uint64_t{1} << 40;
  endpoint.broadcast_algorithm = "tree";
  endpoint.link_gbits = 2.5;
  const std::string bytes = endpoint.Encode();
  Endpoint back;
  EXPECT_EQ(Endpoint::Decode(bytes, 0, &back).Report(), "ok");
  EXPECT_EQ(back.host, endpoint.host);
  EXPECT(back.addresses == endpoint.addresses);
  EXPECT_EQ(back.port, 4711);
  EXPECT_EQ(back.arena_bytes, endpoint.arena_bytes);
  EXPECT_EQ(back.broadcast_algorithm, "tree");
  EXPECT_EQ(back.link_gbits, 2.5);
  for (size_t n = 0; n < bytes.size(); ++n)
    EXPECT(!Endpoint::Decode(bytes.substr(0, n), 0, &back).ok());
}

Agreed Tensor(const std::string& name, DType dtype, int64_t count, int64_t placement = -1,
              bool everywhere = true) {
  std::vector<Request> by_rank(2);
  for (int r = 0; r < 2; ++r) {
    by_rank[static_cast<size_t>(r)].name = name;
    by_rank[static_cast<size_t>(r)].entries = {
        {dtype, {count}, r == 0 || everywhere ? placement : -1}};
  }
  Agreed agreed;
  agreed.by_rank = std::make_shared<const std::vector<Request>>(std::move(by_rank));
  return agreed;
}

// The sizes of the batches, by the numbers of their tensors.
std::vector<size_t> Plan(const std::vector<Agreed>& agreed, size_t threshold) {
  std::vector<size_t> sizes;
  size_t pieces = 0;
  for (const Batch& batch : PlanBatches(agreed, threshold)) {
    sizes.push_back(batch.pieces.size());
    pieces += batch.pieces.size();
    size_t bytes = 0;
    for (const Batch::Piece& piece : batch.pieces) {
      const Entry& entry = (*agreed[piece.agreed].by_rank)[0].entries[piece.entry];
      EXPECT(entry.dtype == batch.call.dtype);
      bytes += static_cast<size_t>(entry.count()) * SizeOf(entry.dtype);
    }
    EXPECT(batch.pieces.size() == 1 || bytes <= threshold);
    EXPECT_EQ(batch.bytes, bytes);
  }
  EXPECT_EQ(pieces, agreed.size());
  return sizes;
}

TEST(FusionPlansByDtypeAndThreshold) {
  using Sizes = std::vector<size_t>;
  const std::vector<Agreed> small = {
      Tensor("a", DType::kFloat32, 10), Tensor("b", DType::kInt32, 10),
      Tensor("c", DType::kFloat32, 10), Tensor("d", DType::kInt32, 10)};
  EXPECT(Plan(small, 1 << 20) == (Sizes{2, 2}));
  EXPECT(Plan(small, 79) == (Sizes{1, 1, 1, 1}));
  EXPECT(Plan(small, 80) == (Sizes{2, 2}));
  EXPECT(Plan(small, 0) == (Sizes{1, 1, 1, 1}));
  EXPECT(Plan({}, 1 << 20).empty());
  // Large ones go alone.
  EXPECT(Plan({Tensor("a", DType::kFloat32, 1 << 20), Tensor("b", DType::kFloat32, 4),
               Tensor("c", DType::kFloat32, 4)},
              64 << 20) == (Sizes{1, 2}));
}

Agreed Exchange(Collective collective, DType dtype, const std::vector<int64_t>& rows, int64_t width,
                double prescale = 1, size_t entries = 1) {
  std::vector<Request> by_rank(rows.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    by_rank[r].collective = collective;
    by_rank[r].prescale = prescale;
    by_rank[r].entries.assign(entries, {dtype, {rows[r], width}});
  }
  Agreed agreed;
  agreed.by_rank = std::make_shared<const std::vector<Request>>(std::move(by_rank));
  return agreed;
}

TEST(FusionOfAllgathersAndReducescatters) {
  const auto sizes = [](const std::vector<Agreed>& agreed) {
    std::vector<size_t> found;
    for (const Batch& batch : PlanBatches(agreed, 64 << 20)) found.push_back(batch.pieces.size());
    return found;
  };
  using Sizes = std::vector<size_t>;
  const auto gather = Collective::kAllgather, scatter = Collective::kReducescatter;
  const DType f32 = DType::kFloat32, u8 = DType::kUInt8;
  // Bytes are bytes; of an allgather the rows of all ranks count.
  EXPECT(sizes({Exchange(gather, f32, {1, 3}, 2), Exchange(gather, u8, {0, 0}, 7),
                Exchange(gather, f32, {0, 5}, 1, 1, 3)}) == (Sizes{5}));
  EXPECT(sizes({Exchange(gather, u8, {1, 65536}, 1), Exchange(gather, u8, {1, 65535}, 1),
                Exchange(gather, u8, {1, 1}, 1)}) == (Sizes{1, 2}));
  const auto both = PlanBatches({Exchange(gather, u8, {1, 65534}, 1)}, 64 << 20);
  EXPECT_EQ(both[0].bytes, size_t{65535});
  EXPECT_EQ(sizes({Exchange(gather, u8, {30000, 30000}, 1, 1, 40)}).size(), size_t{3});
  // What reduces must do so alike; what is scaled stays with its operation.
  EXPECT(sizes({Exchange(scatter, f32, {4, 4}, 2), Exchange(scatter, u8, {4, 4}, 2),
                Exchange(scatter, f32, {5, 5}, 3), Exchange(gather, f32, {4, 4}, 2)}) ==
         (Sizes{2, 1, 1}));
  EXPECT(sizes({Exchange(scatter, f32, {4, 4}, 2, 2, 2), Exchange(scatter, f32, {4, 4}, 2, 2)}) ==
         (Sizes{2, 1}));
  EXPECT(sizes({Exchange(scatter, f32, {4, 4}, 5000), Exchange(scatter, f32, {4, 4}, 2)}) ==
         (Sizes{1, 1}));
}

TEST(FusionLeavesAloneWhatLiesInEngineMemory) {
  const auto batches = PlanBatches(
      {Tensor("a", DType::kFloat32, 30000, 4096), Tensor("b", DType::kFloat32, 30000, 8192),
       Tensor("c", DType::kFloat32, 30000, 0, false), Tensor("d", DType::kFloat32, 5)},
      64 << 20);
  EXPECT_EQ(batches.size(), size_t{3});
  EXPECT(batches[0].call.placement == (std::vector<int64_t>{4096, 4096}));
  EXPECT(batches[1].call.placement == (std::vector<int64_t>{8192, 8192}));
  EXPECT(batches[2].call.placement.empty());  // not in engine memory on every rank
  EXPECT_EQ(batches[2].pieces.size(), size_t{2});
}

}  // namespace
}  // namespace sparkvod
