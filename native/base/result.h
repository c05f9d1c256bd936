// An error as a value: a code, what happened in words, and the error that caused it.
#pragma once

#include <cerrno>
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
    r.story_ = std::make_shared<const Story>(Story{code, std::move(what), cause.story_});
    return r;
  }
  // `what` failed with the given errno.
  static Result Errno(std::string what, int error, Code code = Code::kSystem) {
    what += std::string(": ") + std::strerror(error);
    // The limit is the one thing that a reader can change about it.
    if (error == EMFILE)
      what +=
          "; a rank needs about ten descriptors and two for each rank on another host: raise "
          "the limit of this process (ulimit -n)";
    return Fail(code, std::move(what));
  }

  bool ok() const { return story_ == nullptr; }
  Code code() const { return story_ ? story_->code : Code::kOk; }
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
  };
  std::shared_ptr<const Story> story_;
};

}  // namespace sparkvod

// Returns from the enclosing function with the error of `expression`, if there is one.
#define SPARKVOD_TRY(expression)                                                           \
  do {                                                                                     \
    if (::sparkvod::Result try_result = (expression); !try_result.ok()) return try_result; \
  } while (false)
