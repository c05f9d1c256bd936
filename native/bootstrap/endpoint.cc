#include "native/bootstrap/endpoint.h"

#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>

#include "native/base/wire.h"
#include "native/bootstrap/arena_size.h"

namespace sparkvod {
namespace {

constexpr uint32_t kMagic = 0x34767073;  // "spv4"
constexpr size_t kNameLimit = 256;
constexpr size_t kAddressLimit = 64;

std::string FirstLine(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string Inode(const char* path) {
  struct stat s{};
  return ::stat(path, &s) == 0 ? std::to_string(s.st_ino) : "?";
}

}  // namespace

std::string Endpoint::Encode() const {
  Writer w;
  w.Put(kMagic);
  for (const std::string* s : {&host, &host_id, &process, &transport, &allreduce_algorithm,
                               &broadcast_algorithm, &not_shared, &unix_name})
    w.PutString(s->substr(0, kNameLimit));
  w.Put<int32_t>(port);
  w.Put(staging_bytes);
  w.Put(arena_bytes);
  w.Put(address_space);
  w.Put(fusion_threshold);
  w.Put(one_shot_bytes);
  w.Put(cache_capacity);
  w.Put(tcp_streams);
  w.Put(link_gbits);
  w.Put<uint8_t>(tls ? 1 : 0);
  w.Put(static_cast<uint32_t>(addresses.size()));
  for (const std::string& a : addresses) w.PutString(a);
  return w.Take();
}

Result Endpoint::Decode(const std::string& bytes, int rank, Endpoint* out) {
  Reader r(bytes);
  const bool known = r.Get<uint32_t>() == kMagic;
  if (!known)
    return Result::Fail(Code::kInvalid, "the endpoint of rank " + std::to_string(rank) + " (" +
                                            std::to_string(bytes.size()) +
                                            " bytes) was not made by this version of sparkvod; "
                                            "all ranks must run the same version");
  for (std::string* s :
       {&out->host, &out->host_id, &out->process, &out->transport, &out->allreduce_algorithm,
        &out->broadcast_algorithm, &out->not_shared, &out->unix_name})
    *s = r.GetString(kNameLimit);
  out->port = r.Get<int32_t>();
  out->staging_bytes = r.Get<uint64_t>();
  out->arena_bytes = r.Get<uint64_t>();
  out->address_space = r.Get<uint64_t>();
  out->fusion_threshold = r.Get<uint64_t>();
  out->one_shot_bytes = r.Get<uint64_t>();
  out->cache_capacity = r.Get<uint64_t>();
  out->tcp_streams = r.Get<uint64_t>();
  out->link_gbits = r.Get<double>();
  out->tls = r.Get<uint8_t>() != 0;
  const size_t count = r.GetCount(sizeof(uint32_t));
  for (size_t i = 0; i < count; ++i) out->addresses.push_back(r.GetString(kAddressLimit));
  if (!r.ok() || !r.AtEnd())
    return Result::Fail(Code::kInvalid,
                        "the endpoint of rank " + std::to_string(rank) + " is damaged");
  return {};
}

std::string Endpoint::KernelId() {
  return FirstLine("/proc/sys/kernel/random/boot_id") + "/" + Inode("/proc/self/ns/net") + "/" +
         Inode("/proc/self/ns/user") + "/" + std::to_string(::geteuid());
}

Endpoint Endpoint::OfThisProcess(const Config& config) {
  Endpoint e;
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  e.host = config.host_id.empty() ? name : config.host_id;
  e.host_id = config.host_id.empty() ? KernelId() : config.host_id;
  // Field 22 of stat is the start time: a process id may be used again. Ids mean something within
  // their namespace only.
  std::string stat = FirstLine("/proc/self/stat");
  stat = stat.substr(stat.rfind(')') + 1);
  e.process = std::to_string(::getpid()) + "/" + Inode("/proc/self/ns/pid") + "/";
  size_t at = 0;
  for (int field = 3; field <= 22 && at != std::string::npos; ++field)
    at = stat.find(' ', at + (field > 3 ? 1 : 0));
  if (at != std::string::npos) e.process += stat.substr(at + 1, stat.find(' ', at + 1) - at - 1);
  e.transport = config.transport;
  e.allreduce_algorithm = config.allreduce_algorithm;
  e.broadcast_algorithm = config.broadcast_algorithm;
  e.tcp_streams = static_cast<uint64_t>(config.tcp_streams);
  e.link_gbits = config.link_gbits;
  e.tls = config.tls;
  e.fusion_threshold = static_cast<uint64_t>(config.fusion_threshold);
  e.one_shot_bytes = static_cast<uint64_t>(config.one_shot_bytes);
  e.cache_capacity = static_cast<uint64_t>(config.cache_capacity);
  e.staging_bytes = static_cast<uint64_t>(config.staging_bytes);
  e.arena_bytes = static_cast<uint64_t>(config.arena_bytes);
  if (e.arena_bytes == 0) {
    struct sysinfo info{};
    ::sysinfo(&info);
    e.arena_bytes = static_cast<uint64_t>(info.totalram) * info.mem_unit;
  }
  e.address_space = AddressSpaceForArenas();
  e.arena_bytes = std::min(e.arena_bytes, e.address_space);
  return e;
}

}  // namespace sparkvod
