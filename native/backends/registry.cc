#include "native/backends/backend.h"
#include "native/backends/builtin/builtin.h"

namespace sparkvod {
namespace {

struct Entry {
  const char* name;
  Result (*make)(Communicator*, const Config&, std::unique_ptr<Backend>*);
};

constexpr Entry kBackends[] = {
    {"builtin", MakeBuiltin},
};

}  // namespace

const char* NameOf(Collective collective) {
  constexpr const char* kNames[kCollectiveCount] = {
      "allreduce", "allgather",       "broadcast",          "barrier", "reducescatter", "alltoall",
      "join",      "add_process_set", "remove_process_set", "tune"};
  return kNames[static_cast<int>(collective)];
}

Result MakeBackend(const std::string& name, Communicator* comm, const Config& config,
                   std::unique_ptr<Backend>* out) {
  std::string known;
  for (const Entry& entry : kBackends) {
    if (name == entry.name) return entry.make(comm, config, out);
    known += (known.empty() ? "" : ", ") + std::string(entry.name);
  }
  return Result::Fail(Code::kInvalid,
                      "backend '" + name + "' was asked for, one of " + known + " was expected");
}

}  // namespace sparkvod
