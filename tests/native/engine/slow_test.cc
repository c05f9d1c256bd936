// Ranks that read slowly, stop reading for a while, or for ever; and mutated encrypted bytes.
#include <unistd.h>

#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "native/base/clock.h"
#include "tests/native/relay.h"
#include "tests/native/world.h"

namespace sparkvod {
namespace {

using namespace check;  // NOLINT: a test of what check's worlds run

constexpr double kTimeout = 2.5;
constexpr size_t kCount = 8000000;

using RelayBody = std::function<void(Engine& engine, int rank, Board& board, Relay* relay)>;

// A world of threads over TCP; all that goes to and from rank 0 passes through a relay, which it
// has.
void RunBehindRelay(int size, bool tls, const RelayBody& body) {
  const Holdings holdings;
  RunThreads(size, [&](int rank, Board& board) {
    Config config = TestConfig();
    config.transport = "tcp";
    // What rank 0 itself would say of what does not reach it is not what is asked here.
    config.collective_timeout = rank == 0 ? 2 * kTimeout : kTimeout;
    config.allreduce_algorithm = "ring";
    config.tls = tls;
    std::unique_ptr<Engine> engine;
    std::unique_ptr<Relay> relay;
    std::string endpoint;
    EXPECT(Engine::Create(config, &engine).ok());
    EXPECT_EQ(engine->Listen(&endpoint).Report(), "ok");
    if (rank == 0) relay = std::make_unique<Relay>(endpoint);
    const auto endpoints = board.Gather(rank, relay ? relay->endpoint() : endpoint);
    EXPECT_EQ(engine->Connect(rank, endpoints, "s").Report(), "ok");
    body(*engine, rank, board, relay.get());
    (void)!engine->Shutdown().ok();
    board.Barrier(rank);
  });
  holdings.ExpectUnchanged(__FILE__, __LINE__);
}

Result Sum(Engine& engine, std::vector<float>* data) {
  const Request request =
      AllreduceOf("grad", DType::kFloat32, {static_cast<int64_t>(data->size())});
  return Run(engine, request, {{data->data(), data->data(), data->size()}});
}

// The most that this process has held in memory.
size_t PeakBytes() {
  std::ifstream status("/proc/self/status");
  size_t kilobytes = 0;
  for (std::string word; status >> word;)
    if (word == "VmHWM:") status >> kilobytes;
  return kilobytes << 10;
}

// 10 MB/s, at which a sum takes longer than the time-out, or stops that are shorter than it: nobody
// is accused, and what was not read is nowhere but in the kernel's buffers and in the tensors.
TEST(ASlowReaderIsWaitedFor) {
  if (kSanitized) return;  // under which all are slow, and seconds mean nothing
  for (const bool stops : {false, true})
    for (const int size : {2, 3})
      RunBehindRelay(size, false, [=](Engine& engine, int rank, Board& board, Relay* relay) {
        const auto factor = static_cast<float>(rank + 1);
        std::vector<float> data(kCount, factor);
        EXPECT_EQ(Sum(engine, &data).Report(), "ok");
        data.assign(kCount, factor);
        board.Barrier(rank);
        const size_t before = PeakBytes();
        board.Barrier(rank);
        std::thread hand;
        if (relay != nullptr) {
          if (!stops) {
            relay->inward.piece = 64 << 10;
            relay->inward.pause_us = 6500;
          }
          if (stops)
            hand = std::thread([relay] {
              for (int i = 0; i < 2; ++i) {
                relay->inward.stopped = true;
                ::usleep(1000000);
                relay->inward.stopped = false;
                ::usleep(300000);
              }
            });
        }
        if (relay != nullptr && stops) ::usleep(50000);
        EXPECT_EQ(Sum(engine, &data).Report(), "ok");
        EXPECT_EQ(data.front(), static_cast<float>(size * (size + 1) / 2));
        EXPECT_EQ(data.back(), static_cast<float>(size * (size + 1) / 2));
        if (hand.joinable()) hand.join();
        // A queue of what was not read would hold half of it and more.
        EXPECT(PeakBytes() < before + kCount * sizeof(float) / 4);
        if (relay != nullptr) relay->inward.pause_us = 0;
        EXPECT_EQ(BarrierOf(engine, "end").Report(), "ok");
      });
}

// Rank 0 sends, and reads no more: who has got all that it waits for names who does not read.
TEST(AReaderThatStopsForEverIsNamed) {
  if (kSanitized) return;
  for (const int size : {2, 3})
    RunBehindRelay(size, false, [=](Engine& engine, int rank, Board& board, Relay* relay) {
      // More than the kernel's buffers take.
      std::vector<float> data(2 * kCount, 1);
      EXPECT_EQ(Sum(engine, &data).Report(), "ok");
      board.Barrier(rank);
      // The negotiation's few bytes pass; the tensor's do not.
      if (relay != nullptr) relay->inward.piece = 1;
      if (relay != nullptr) relay->inward.pause_us = 100;
      const int64_t began = NowNs();
      std::thread hand;
      if (relay != nullptr)
        hand = std::thread([relay] {
          ::usleep(100000);
          relay->inward.stopped = true;
        });
      const Result result = Sum(engine, &data);
      const double seconds = static_cast<double>(NowNs() - began) * 1e-9;
      if (hand.joinable()) hand.join();
      EXPECT(result.code() == Code::kTimeout);
      if (rank == 0) return;           // what the others say does not reach it either
      EXPECT(seconds < 2 * kTimeout);  // it counts from the last byte that moved
      EXPECT_CONTAINS(result.Report(), "for rank 0 on ");
    });
}

// Bytes that are changed, added or cut off between two ranks end the world at once.
TEST(TlsEndsAWorldWhoseBytesAreMutated) {
  if (!CanEncrypt()) return;
  for (const auto kind : {Relay::Mutation::kFlip, Relay::Mutation::kInsert, Relay::Mutation::kCut})
    for (const bool inward : {true, false})
      RunBehindRelay(2, true, [=](Engine& engine, int rank, Board& board, Relay* relay) {
        std::vector<float> data(100000, 1);
        EXPECT_EQ(Sum(engine, &data).Report(), "ok");
        board.Barrier(rank);
        // Past the negotiation's few bytes, within the tensor's.
        if (relay != nullptr) (inward ? relay->inward : relay->outward).Mutate(kind, 2000);
        const int64_t began = NowNs();
        const Result result = Sum(engine, &data);
        EXPECT((NowNs() - began) * 1e-9 < 1);
        EXPECT(result.code() == Code::kPeerLost);
        EXPECT_CONTAINS(result.Report(), "rank ");
      });
}

}  // namespace
}  // namespace sparkvod
