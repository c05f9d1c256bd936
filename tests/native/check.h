// A test runner of sixty lines: TEST(Name) { EXPECT...(…); }, a filter by substring, and a count at
// the end.
//
// Ours, so that the native tests build wherever the engine builds. Expectations may be used from
// any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <iostream>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace sparkvod::check {

struct Case {
  const char* name;
  std::function<void()> body;
};

// What the runner knows: the registered cases, whether `--full` was asked for, what begins chance,
// and the current case's failures.
struct State {
  std::vector<Case> cases;
  bool full = false;
  uint64_t seed = 0;
  std::mutex mu;
  int failures = 0;

  static State& Get() {
    static State state;
    return state;
  }
};

struct Register {
  Register(const char* name, std::function<void()> body) {
    State::Get().cases.push_back({name, std::move(body)});
  }
};

// True when the whole cross product is asked for, not a representative part.
inline bool Full() { return State::Get().full; }

// What tests that try this and that begin with: 1, in full another number in each run, or
// `--seed=NUMBER`.
inline uint64_t Seed() { return State::Get().seed; }

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// True where each path needs to be gone but once: a sanitizer, which makes all of it many times
// slower, looks at memory and at threads. That every dtype's and operation's values are right is
// what the plain build says.
inline bool PathsOnly() { return kSanitized && !Full(); }

inline void Fail(const char* file, int line, const std::string& what) {
  State& state = State::Get();
  const std::lock_guard<std::mutex> lock(state.mu);
  if (++state.failures <= 20) std::cerr << file << ":" << line << ": " << what << "\n";
}

template <typename A, typename B>
void ExpectEqual(const char* file, int line, const char* text, const A& a, const B& b) {
  if (a == b) return;
  std::ostringstream out;
  out << text << ": found " << a << ", expected " << b;
  Fail(file, line, out.str());
}

inline void ExpectContains(const char* file, int line, const std::string& text,
                           const std::string& part) {
  if (text.find(part) == std::string::npos)
    Fail(file, line, "'" + text + "' should contain '" + part + "'");
}

}  // namespace sparkvod::check

#define TEST(name)                                                             \
  static void Test##name();                                                    \
  static const ::sparkvod::check::Register kRegister##name(#name, Test##name); \
  static void Test##name()
#define EXPECT(condition)                                                                 \
  do {                                                                                    \
    if (!(condition)) ::sparkvod::check::Fail(__FILE__, __LINE__, "not so: " #condition); \
  } while (false)
#define EXPECT_EQ(found, expected) \
  ::sparkvod::check::ExpectEqual(__FILE__, __LINE__, #found, found, expected)
#define EXPECT_CONTAINS(text, part) \
  ::sparkvod::check::ExpectContains(__FILE__, __LINE__, text, part)
