// What ends a connect() before the world is there: an abort or a shutdown by another thread.
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "native/base/clock.h"
#include "tests/native/world.h"

namespace sparkvod {
namespace {

using namespace check;  // NOLINT: a test of what check's worlds run

// An engine that listens, and would connect for longer than the test may take.
struct Listening {
  explicit Listening(const std::string& transport) {
    Config config = TestConfig();
    config.transport = transport;
    config.start_timeout = 50;
    EXPECT(Engine::Create(config, &engine).ok());
    EXPECT_EQ(engine->Listen(&endpoint).Report(), "ok");
  }
  std::unique_ptr<Engine> engine;
  std::string endpoint;
};

// A connect() in a thread of its own.
class Connecting {
 public:
  Connecting(Engine* engine, int rank, const std::vector<std::string>& endpoints)
      : thread_([this, engine, rank, endpoints] {
          result_ = engine->Connect(rank, endpoints, "s");
          ended_ns_ = NowNs();
        }) {}
  // Does `what` and returns how connect() ended; it must do so soon.
  Result EndedBy(const std::function<void()>& what) {
    const int64_t begin = NowNs();
    what();
    thread_.join();
    EXPECT((ended_ns_ - begin) * 1e-9 < 0.5);
    return result_;
  }

 private:
  Result result_;
  int64_t ended_ns_ = 0;
  std::thread thread_;
};

void Pause() { std::this_thread::sleep_for(std::chrono::milliseconds(200)); }

TEST(AConnectIsEndedByAnotherThread) {
  const Holdings holdings;
  for (const bool abort : {true, false}) {
    for (const char* transport : {"auto", "tcp"}) {
      Listening one(transport), absent(transport);
      Connecting connecting(one.engine.get(), 0, {one.endpoint, absent.endpoint});
      Pause();
      const Result result = connecting.EndedBy([&] {
        if (abort)
          one.engine->Abort("told so by another thread");
        else
          EXPECT_EQ(one.engine->Shutdown().Report(), "ok");
      });
      EXPECT(result.code() == (abort ? Code::kPeerLost : Code::kShutDown));
      EXPECT_CONTAINS(result.Report(), abort ? "told so by another thread" : "shut down");
      EXPECT(!one.engine->running());
      // It is the engine's end.
      EXPECT_EQ(one.engine->Connect(0, {one.endpoint, absent.endpoint}, "s").Report(),
                result.Report());
      float data = 1;
      int64_t handle = 0;
      EXPECT_EQ(one.engine
                    ->Submit(AllreduceOf("late", DType::kFloat32, {1}), {{&data, &data, 1}}, true,
                             &handle)
                    .Report(),
                result.Report());
      EXPECT(one.engine->Shutdown().ok());
    }
  }
  holdings.ExpectUnchanged(__FILE__, __LINE__);
}

// Rank 1 has met everybody, and waits for the memory of rank 0, which still looks for rank 2.
TEST(AConnectIsEndedWhileItWaitsForMemory) {
  const Holdings holdings;
  {
    Listening zero("auto"), one("auto"), two("auto"), decoy("auto");
    const std::vector<std::string> right{zero.endpoint, one.endpoint, two.endpoint};
    Connecting first(zero.engine.get(), 0, right), second(one.engine.get(), 1, right),
        third(two.engine.get(), 2, {decoy.endpoint, one.endpoint, two.endpoint});
    Pause();
    const auto abort = [](Listening& rank) { return [&rank] { rank.engine->Abort("enough"); }; };
    EXPECT_CONTAINS(second.EndedBy(abort(one)).Report(), "enough");
    EXPECT_CONTAINS(first.EndedBy(abort(zero)).Report(), "enough");
    EXPECT_CONTAINS(third.EndedBy(abort(two)).Report(), "enough");
  }
  holdings.ExpectUnchanged(__FILE__, __LINE__);
}

TEST(AnAbortBeforeConnectIsNotForgotten) {
  Listening one("tcp"), absent("tcp");
  one.engine->Abort("before it began");
  const Result result = one.engine->Connect(0, {one.endpoint, absent.endpoint}, "s");
  EXPECT(result.code() == Code::kPeerLost);
  EXPECT_CONTAINS(result.Report(), "before it began");
}

// A connect() that failed by itself may be tried again, as before.
TEST(AConnectThatFailedLeavesTheEngineListening) {
  Listening one("tcp");
  EXPECT(one.engine->Connect(0, {"rubbish"}, "s").code() == Code::kInvalid);
  EXPECT_EQ(one.engine->Connect(0, {one.endpoint}, "s").Report(), "ok");
  EXPECT(one.engine->running());
  EXPECT(one.engine->Shutdown().ok());
}

// Another thread may ask for memory and numbers at any moment, and is refused the memory until
// then.
TEST(AnEngineIsAskedWhileItConnects) {
  for (int turn = 0; turn < 10; ++turn) {
    Listening one("auto"), other("auto");
    const std::vector<std::string> endpoints{one.endpoint, other.endpoint};
    Connecting first(one.engine.get(), 0, endpoints), second(other.engine.get(), 1, endpoints);
    std::shared_ptr<Memory> memory;
    const Deadline deadline = Deadline::After(20);
    while (!one.engine->Allocate(64, &memory).ok() && !deadline.Passed())
      EXPECT_EQ(one.engine->GetStats().in_flight, uint64_t{0});
    EXPECT(memory != nullptr);
    EXPECT(first.EndedBy([] {}).ok());
    EXPECT(second.EndedBy([] {}).ok());
  }
}

// At whatever moment the abort comes, it ends the connect or the world that it made, on both ranks.
TEST(AnAbortAtAnyMomentOfAConnect) {
  const Holdings holdings;
  for (int turn = 0; turn < 40; ++turn) {
    Listening one(turn % 2 == 0 ? "auto" : "tcp"), other(turn % 2 == 0 ? "auto" : "tcp");
    const std::vector<std::string> endpoints{one.endpoint, other.endpoint};
    Connecting first(one.engine.get(), 0, endpoints), second(other.engine.get(), 1, endpoints);
    std::this_thread::sleep_for(std::chrono::microseconds(turn * 50));
    const Result result = first.EndedBy([&] { one.engine->Abort("at some moment"); });
    if (!result.ok()) EXPECT_CONTAINS(result.Report(), "at some moment");
    EXPECT(!one.engine->running());
    // Its world was told by the first, if it came to be.
    const Result told = second.EndedBy([&] { other.engine->Abort("the test is over"); });
    if (!told.ok()) EXPECT(told.code() == Code::kPeerLost);
    EXPECT(!other.engine->running());
  }
  holdings.ExpectUnchanged(__FILE__, __LINE__);
}

}  // namespace
}  // namespace sparkvod
