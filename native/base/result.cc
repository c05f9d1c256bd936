#include "native/base/result.h"

#include <sys/resource.h>

#include <cerrno>

namespace sparkvod {
namespace {

// The limit is the one thing that a reader can change about it.
std::string Advice(int error) {
  if (error == ENFILE)
    return "; this host has no descriptor left for any process: raise fs.file-max (sysctl)";
  if (error != EMFILE) return "";
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return "; this process may have " + std::to_string(limit.rlim_cur) +
         " descriptors, and a rank needs about ten, three for each other rank of its host and two "
         "for each on another host: raise the limit (ulimit -n)";
}

}  // namespace

Result Result::Errno(const std::string& what, int error, Code code) {
  Result r;
  r.story_ = std::make_shared<const Story>(
      Story{code, what + ": " + std::strerror(error) + Advice(error), nullptr, error});
  return r;
}

bool Result::out_of_descriptors() const { return error() == EMFILE || error() == ENFILE; }

}  // namespace sparkvod
