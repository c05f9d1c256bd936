// An error as a value: a code, what happened in words, and the error that caused it.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>

namespace sparkvod {

// The families that callers tell apart; bindings map each to a Python exception.
enum class Code {
  kOk,
  kInvalid,   // the caller's mistake
  kMismatch,  // ranks submitted different things under one name
  kPeerLost,  // a peer died or left
  kTimeout,   // a deadline passed
  kShutDown,  // the engine was shut down meanwhile
  kSystem,    // the operating system refused something
};

// Copies share the (immutable) story, so one cause can complete many handles.
class [[nodiscard]] Result {
 public:
  Result() = default;
  static Result Ok() { return {}; }
  static Result Fail(Code code, std::string what, const Result& cause = {}) {
    Result r;
    r.story_ = std::make_shared<const Story>(Story{code, std::move(what), cause.story_, 0});
    return r;
  }
  // `what` failed with the given errno.
  static Result Errno(const std::string& what, int error, Code code = Code::kSystem);

  bool ok() const { return story_ == nullptr; }
  Code code() const { return story_ ? story_->code : Code::kOk; }
  // The errno that this error was made of; 0 when it was none.
  int error() const { return story_ ? story_->error : 0; }
  // Whether the process, or the host, has no descriptor left: who tries again fails again.
  bool out_of_descriptors() const;
  // The story from the outermost error to its first cause, one sentence each.
  std::string Report() const {
    std::string text;
    for (const Story* s = story_.get(); s != nullptr; s = s->cause.get()) {
      if (!text.empty()) text += "; because ";
      text += s->what;
    }
    return text.empty() ? "ok" : text;
  }

 private:
  struct Story {
    Code code;
    std::string what;
    std::shared_ptr<const Story> cause;
    int error = 0;
  };
  std::shared_ptr<const Story> story_;
};

}  // namespace sparkvod

// Returns from the enclosing function with the error of `expression`, if there is one.
#define SPARKVOD_TRY(expression)                                                           \
  do {                                                                                     \
    if (::sparkvod::Result try_result = (expression); !try_result.ok()) return try_result; \
  } while (false)
