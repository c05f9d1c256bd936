// The writer: what is told is in the file, in valid lines; what does not fit is counted.
#include "native/base/timeline.h"

#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/native/check.h"

namespace sparkvod {
namespace {

std::string TemporaryFile(const char* name) {
  return "/tmp/sparkvod-timeline-" + std::to_string(::getpid()) + "-" + name + ".json";
}

std::string Contents(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

size_t Count(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(TimelineWritesWhatItIsTold) {
  const std::string path = TemporaryFile("told");
  Timeline timeline;
  EXPECT(!timeline.on());
  {
    const Phase nothing(&timeline, "before");
  }
  timeline.Add({Lane::kEngine, {}, "before", 1, 2, -1, {}});
  EXPECT_EQ(timeline.Start(path, {3, 4, "host\"x"}, true).Report(), "ok");
  EXPECT(timeline.on() && timeline.mark_cycles());
  EXPECT(!timeline.Start(path, {}, false).ok());
  {
    const Phase outer(&timeline, "outer", 7);
    const Phase inner(&timeline, "inner");
  }
  timeline.Add({{Lane::kTensor, "a\\\"\n", "allreduce", NowNs(), NowNs(), 8, "of float32"},
                {Lane::kTensor, "a\\\"\n", "queue", NowNs(), NowNs(), -1, {}}});
  timeline.Add({Lane::kThread, "MainThread", "backward", NowNs(), NowNs(), -1, {}});
  timeline.Stop();
  timeline.Stop();
  EXPECT(!timeline.on());
  EXPECT_EQ(timeline.written(), 5u);
  EXPECT_EQ(timeline.dropped(), 0u);
  const std::string text = Contents(path);
  EXPECT_EQ(text.substr(0, 2), "[\n");
  EXPECT_EQ(text.substr(text.size() - 3), "\n]\n");
  for (const char* part : {"\"rank\":3,\"size\":4,\"host\":\"host\\\"x\"", "\"monotonic_ns\":",
                           "\"outer\"", "\"bytes\":7", "\"inner\"", "\"a\\\\\\\"\\u000a\"",
                           "\"detail\":\"of float32\"", "\"backward\"", "\"dropped\":0"})
    EXPECT_CONTAINS(text, part);
  EXPECT_EQ(Count(text, "before"), 0u);
  ::unlink(path.c_str());
  EXPECT(timeline.Start("/nowhere/at/all.json", {}, false).code() == Code::kInvalid);
}

TEST(TimelineSharesLanesAmongManyNames) {
  const std::string path = TemporaryFile("lanes");
  Timeline timeline;
  EXPECT(timeline.Start(path, {}, false).ok());
  const int64_t now = NowNs();
  for (int i = 0; i < 1000; ++i) {
    const std::string name = "tensor" + std::to_string(i);
    timeline.Add({{Lane::kTensor, name, "allreduce", now + i * 10, now + i * 10 + 15, -1, {}},
                  {Lane::kTensor, name, "queue", now + i * 10, now + i * 10 + 5, -1, {}}});
  }
  timeline.Stop();
  const std::string text = Contents(path);
  EXPECT_EQ(Count(text, "\"thread_name\""), 1u + 256 + 2);  // two overlap at any time
  EXPECT_EQ(Count(text, "\"queue\""), 1000u);
  ::unlink(path.c_str());
}

TEST(TimelineDropsAndCountsWhatItCannotHold) {
  const std::string path = TemporaryFile("drops");
  Timeline timeline;
  EXPECT(timeline.Start(path, {}, false).ok());
  constexpr int kThreads = 4, kEach = 100000;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&timeline] {
      for (int i = 0; i < kEach; ++i) const Phase phase(&timeline, "phase");
    });
  for (std::thread& thread : threads) thread.join();
  timeline.Stop();
  EXPECT_EQ(timeline.written() + timeline.dropped(), static_cast<uint64_t>(kThreads) * kEach);
  const std::string text = Contents(path);
  EXPECT_EQ(Count(text, "\"phase\""), timeline.written());
  EXPECT_CONTAINS(text, "\"dropped\":" + std::to_string(timeline.dropped()));
  ::unlink(path.c_str());
}

}  // namespace
}  // namespace sparkvod
