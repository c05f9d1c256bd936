// What an engine tells its timeline, started and stopped while it runs.
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tests/native/world.h"

namespace sparkvod {
namespace {

using namespace check;  // NOLINT: a test of what check's worlds run

std::string Contents(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

void Allreduce(Engine& engine, const std::string& name, size_t count) {
  std::vector<float> data(count, 1.0f);
  const Request request = AllreduceOf(name, DType::kFloat32, {static_cast<int64_t>(count)});
  EXPECT_EQ(Run(engine, request, {{data.data(), data.data(), count}}).Report(), "ok");
}

TEST(TimelineOfAnEngine) {
  const std::string prefix = "/tmp/sparkvod-engine-timeline-" + std::to_string(::getpid()) + "-";
  for (const Kind& kind : {kInproc, kTcp})
    RunWorld(kind, 3, [&](Engine& engine, int rank) {
      const std::string path = prefix + std::to_string(rank);
      Allreduce(engine, "before", 10);
      EXPECT_EQ(BarrierOf(engine, "start").Report(), "ok");
      EXPECT_EQ(engine.StartTimeline(path, false).Report(), "ok");
      EXPECT(!engine.StartTimeline(path, false).ok());
      Allreduce(engine, "small", 10);
      Allreduce(engine, "large", 1000000);
      engine.StopTimeline();
      Allreduce(engine, "after", 10);
      const std::string text = Contents(path);
      for (const char* part :
           {"\"small\"", "\"large\"", "\"queue\"", "\"negotiate\"", "\"execute\"",
            "allreduce (sum) of float32 [1000000]", "\"bytes\":4000000"})
        EXPECT_CONTAINS(text, part);
      EXPECT_CONTAINS(text, kind.transport == "tcp" ? "ring reduce-scatter step" : "reduce");
      EXPECT_CONTAINS(text, kind.transport == "tcp" ? "allreduce ring" : "allreduce staged");
      EXPECT(text.find("before") == std::string::npos);
      EXPECT(text.find("after") == std::string::npos);
      ::unlink(path.c_str());
    });
}

TEST(TimelineEndsWithItsEngine) {
  const std::string prefix = "/tmp/sparkvod-ended-timeline-" + std::to_string(::getpid()) + "-";
  RunWorld(kInproc, 2, [&](Engine& engine, int rank) {
    EXPECT_EQ(engine.StartTimeline(prefix + std::to_string(rank), true).Report(), "ok");
    Allreduce(engine, "x", 10);
  });
  for (int rank = 0; rank < 2; ++rank) {
    const std::string path = prefix + std::to_string(rank), text = Contents(path);
    EXPECT_CONTAINS(text, "sparkvod_end");
    ::unlink(path.c_str());
  }
  std::unique_ptr<Engine> engine;
  EXPECT(Engine::Create(TestConfig(), &engine).ok());
  EXPECT(engine->StartTimeline("/tmp/x", false).code() == Code::kInvalid);
}

}  // namespace
}  // namespace sparkvod
