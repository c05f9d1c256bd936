#include "native/engine/told.h"

#include <algorithm>

namespace sparkvod {

std::vector<Slice> LifeOf(const Operation& operation, int64_t ended_ns) {
  const Request& request = operation.request;
  std::vector<Slice> life;
  const auto add = [&](const char* name, int64_t begin_ns, int64_t end_ns) {
    if (begin_ns != 0 && end_ns != 0)
      life.push_back(
          {Lane::kTensor, request.name, name, begin_ns, std::max(begin_ns, end_ns), -1, {}});
  };
  add(NameOf(request.collective), operation.submitted_ns, ended_ns);
  life[0].bytes = request.bytes();
  life[0].detail =
      operation.result.ok() ? request.Describe() : "failed: " + operation.result.Report();
  add("queue", operation.taken_ns != 0 ? operation.submitted_ns : 0, operation.taken_ns);
  add("negotiate", operation.taken_ns, operation.agreed_ns);
  add("wait", operation.agreed_ns, operation.began_ns);
  add("execute", operation.began_ns, operation.began_ns != 0 ? ended_ns : 0);
  return life;
}

}  // namespace sparkvod
