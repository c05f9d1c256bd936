// Byte streams between two TCP ranks that are mutated on their way, from the handshake's first byte
// on. Encrypted, none of them gives a wrong sum. In the clear payloads are not protected, so a sum
// may be wrong; nothing crashes (the sanitizers look too) and nothing waits past its deadline.
#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "native/base/clock.h"
#include "tests/native/relay.h"
#include "tests/native/terms.h"
#include "tests/native/world.h"

namespace sparkvod {
namespace {

using namespace check;  // NOLINT: a test of what check's worlds run

constexpr double kTimeout = 1;
// What a busy machine may add to a deadline.
constexpr double kSlack = kSanitized ? 10 : 5;
constexpr size_t kHandshakeBytes = 400;
constexpr size_t kMostCount = 4000;

struct Outcomes {
  std::atomic<int> right{0}, wrong{0}, refused{0};
};

// Where and how stream number `number` is mutated: every second one within what connects the ranks,
// the others within negotiations and payloads.
void MutateStream(Relay* relay, int number) {
  std::mt19937_64 random(Seed() * 1000 + static_cast<uint64_t>(number));
  const auto kind = static_cast<Relay::Mutation>(1 + random() % 6);
  const size_t within = number % 2 == 0 ? kHandshakeBytes : 40 * kMostCount;
  Relay::Way& way = random() % 2 == 0 ? relay->inward : relay->outward;
  way.Mutate(kind, random() % within, 1 + random() % 200);
}

void ExpectInTime(int64_t began_ns, int number, const std::string& what) {
  const double seconds = static_cast<double>(NowNs() - began_ns) * 1e-9;
  if (seconds > kTimeout + kSlack)
    Fail(__FILE__, __LINE__,
         what + " of stream " + std::to_string(number) + " took " + std::to_string(seconds) + " s");
}

// Sums of several sizes until one fails.
void SumAll(Engine& engine, int rank, int number, Outcomes* outcomes) {
  for (int turn = 0; turn < 6; ++turn) {
    const size_t count = turn % 3 == 0 ? 1 + static_cast<size_t>(turn) : kMostCount;
    std::vector<float> data = Terms(rank, count), sums(count);
    for (size_t i = 0; i < count; ++i) sums[i] = Term(0, i) + Term(1, i);
    const Request request = AllreduceOf("sum " + std::to_string(turn % 4), DType::kFloat32,
                                        {static_cast<int64_t>(count)});
    const int64_t began = NowNs();
    const Result result = Run(engine, request, {{data.data(), data.data(), count}});
    ExpectInTime(began, number, "a sum");
    if (!result.ok()) {
      ++outcomes->refused;
      return;
    }
    ++(data == sums ? outcomes->right : outcomes->wrong);
  }
}

void RunStream(int number, bool tls, Outcomes* outcomes) {
  RunThreads(2, [&](int rank, Board& board) {
    Config config = TestConfig();
    config.transport = "tcp";
    config.start_timeout = kTimeout;
    config.collective_timeout = kTimeout;
    config.arena_bytes = 4 << 20;
    config.tls = tls;
    config.spin_us = 0;  // sixteen worlds share the cores
    std::unique_ptr<Engine> engine;
    std::unique_ptr<Relay> relay;
    std::string endpoint;
    EXPECT(Engine::Create(config, &engine).ok());
    EXPECT_EQ(engine->Listen(&endpoint).Report(), "ok");
    if (rank == 0) relay = std::make_unique<Relay>(endpoint);
    if (relay) MutateStream(relay.get(), number);
    const auto endpoints = board.Gather(rank, relay ? relay->endpoint() : endpoint);
    int64_t began = NowNs();
    const Result connected = engine->Connect(rank, endpoints, "s");
    ExpectInTime(began, number, "connecting");
    if (connected.ok())
      SumAll(*engine, rank, number, outcomes);
    else
      ++outcomes->refused;
    began = NowNs();
    (void)!engine->Shutdown().ok();
    ExpectInTime(began, number, "shutting down");
    board.Barrier(rank);
  });
}

// Most streams only wait for a deadline, so several are tried at a time.
void RunStreams(bool tls, Outcomes* outcomes) {
  const int streams = PathsOnly() ? 60 : 200;
  constexpr int kAtATime = 16;
  const Holdings holdings;
  std::atomic<int> next{0};
  std::vector<std::thread> lanes;
  lanes.reserve(kAtATime);
  for (int lane = 0; lane < kAtATime; ++lane)
    lanes.emplace_back([&] {
      for (int number = next++; number < streams; number = next++) RunStream(number, tls, outcomes);
    });
  for (std::thread& lane : lanes) lane.join();
  holdings.ExpectUnchanged(__FILE__, __LINE__);
  EXPECT(outcomes->right > 0);    // a stranger's bytes do not keep a world from coming together
  EXPECT(outcomes->refused > 0);  // and mutations reach the engine
}

TEST(MutatedStreamsInTheClearEndInTime) {
  Outcomes outcomes;
  RunStreams(false, &outcomes);
  EXPECT(outcomes.wrong > 0);  // what docs/security.md says of plain TCP
}

TEST(MutatedStreamsUnderTlsGiveNoWrongSum) {
  if (!CanEncrypt()) return;
  Outcomes outcomes;
  RunStreams(true, &outcomes);
  EXPECT_EQ(outcomes.wrong.load(), 0);
}

}  // namespace
}  // namespace sparkvod
