#include "native/base/timeline.h"

#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <map>
#include <utility>

namespace sparkvod {
namespace {

// Slices that may wait for the writer; about 10 MB.
constexpr size_t kCapacity = 1 << 16;
// The writer looks this often, and whenever the buffer is half full.
constexpr auto kFlushEvery = std::chrono::milliseconds(200);
// Tensors that get a lane of their own. Names that are made up anew for each call would otherwise
// make lanes without end; the others share lanes, each taking one that is free.
constexpr size_t kNamedLanes = 256;

int64_t UnixNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
      out += escaped;
    } else {
      out += c;
    }
  }
  return out + '"';
}

}  // namespace

// The events as an array of JSON that readers accept unfinished, so a killed rank leaves a trace
// that opens. Times are microseconds since the file's beginning; its first event says when that
// was, by both clocks: ranks of one boot share the monotonic one, hosts only the time of day.
class Timeline::File {
 public:
  ~File() {
    if (file_ != nullptr) std::fclose(file_);
  }

  Result Open(const std::string& path, const Author& author) {
    file_ = std::fopen(path.c_str(), "we");
    if (file_ == nullptr)
      return Result::Errno("the timeline " + path + " cannot be written", errno, Code::kInvalid);
    pid_ = author.rank;
    zero_ns_ = NowNs();
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    std::fprintf(file_,
                 "[\n{\"name\":\"sparkvod_clock\",\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"args\":{"
                 "\"rank\":%d,\"size\":%d,\"host\":%s,\"os_pid\":%d,\"boot_id\":%s,"
                 "\"monotonic_ns\":%" PRId64 ",\"unix_ns\":%" PRId64 "}}",
                 pid_, author.rank, author.size, Quoted(author.host).c_str(),
                 static_cast<int>(::getpid()), Quoted(boot).c_str(), zero_ns_, UnixNs());
    Metadata("process_name", 0,
             "\"name\":" + Quoted("rank " + std::to_string(author.rank) + " on " + author.host));
    Metadata("process_sort_index", 0, "\"sort_index\":" + std::to_string(author.rank));
    NameLane(kEngineTid, "engine");
    std::fflush(file_);
    return {};
  }

  void Write(const std::vector<Slice>& slices) {
    for (const Slice& slice : slices) {
      std::fprintf(file_,
                   ",\n{\"name\":%s,\"cat\":\"%s\",\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,"
                   "\"dur\":%.3f",
                   Quoted(slice.name).c_str(), Category(slice.kind), pid_, Tid(slice),
                   static_cast<double>(slice.begin_ns - zero_ns_) * 1e-3,
                   static_cast<double>(slice.end_ns - slice.begin_ns) * 1e-3);
      if (slice.bytes >= 0 || !slice.detail.empty()) {
        std::fprintf(file_, ",\"args\":{");
        if (slice.bytes >= 0) std::fprintf(file_, "\"bytes\":%" PRId64, slice.bytes);
        if (!slice.detail.empty())
          std::fprintf(file_, "%s\"detail\":%s", slice.bytes >= 0 ? "," : "",
                       Quoted(slice.detail).c_str());
        std::fputc('}', file_);
      }
      std::fputc('}', file_);
    }
    std::fflush(file_);
  }

  void End(uint64_t dropped) {
    Metadata("sparkvod_end", 0, "\"dropped\":" + std::to_string(dropped));
    std::fprintf(file_, "\n]\n");
    std::fflush(file_);
  }

 private:
  static constexpr int kEngineTid = 1;
  static constexpr int kFirstThreadTid = 10000;
  static constexpr int kFirstSharedTid = 20000;

  static const char* Category(Lane kind) {
    return kind == Lane::kEngine ? "engine" : kind == Lane::kTensor ? "tensor" : "thread";
  }

  void Metadata(const char* name, int tid, const std::string& args) {
    std::fprintf(file_, ",\n{\"name\":\"%s\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{%s}}",
                 name, pid_, tid, args.c_str());
  }

  void NameLane(int tid, const std::string& name) {
    Metadata("thread_name", tid, "\"name\":" + Quoted(name));
    Metadata("thread_sort_index", tid, "\"sort_index\":" + std::to_string(tid));
  }

  int Tid(const Slice& slice) {
    if (slice.kind == Lane::kEngine) return kEngineTid;
    auto& lanes = slice.kind == Lane::kTensor ? tensors_ : threads_;
    const auto known = lanes.find(slice.lane);
    if (known != lanes.end()) return known->second;
    if (lanes.size() < kNamedLanes) {
      // Threads come first: what the application does stands above what is done for it.
      const int tid = static_cast<int>(lanes.size()) +
                      (slice.kind == Lane::kTensor ? kFirstThreadTid : kEngineTid + 1);
      lanes.emplace(slice.lane, tid);
      NameLane(tid, slice.lane);
      return tid;
    }
    return SharedTid(slice);
  }

  int SharedTid(const Slice& slice) {
    // The slices of one collective come together, the one that holds the others first.
    if (!shared_until_.empty() && slice.lane == last_shared_ &&
        slice.end_ns <= shared_until_[last_place_])
      return kFirstSharedTid + static_cast<int>(last_place_);
    size_t place = 0;
    while (place < shared_until_.size() && shared_until_[place] > slice.begin_ns) ++place;
    if (place == shared_until_.size()) {
      shared_until_.push_back(0);
      NameLane(kFirstSharedTid + static_cast<int>(place),
               "other tensors " + std::to_string(place + 1));
    }
    shared_until_[place] = slice.end_ns;
    last_shared_ = slice.lane;
    last_place_ = place;
    return kFirstSharedTid + static_cast<int>(place);
  }

  std::FILE* file_ = nullptr;
  int pid_ = 0;
  int64_t zero_ns_ = 0;
  std::map<std::string, int> tensors_, threads_;
  std::vector<int64_t> shared_until_;
  std::string last_shared_;
  size_t last_place_ = 0;
};

Result Timeline::Start(const std::string& path, const Author& author, bool mark_cycles) {
  const std::lock_guard<std::mutex> control(control_);
  if (on())
    return Result::Fail(Code::kInvalid,
                        "a timeline was started while one runs; stop that one first");
  auto file = std::make_shared<File>();
  SPARKVOD_TRY(file->Open(path, author));
  written_.store(0);
  dropped_.store(0);
  const std::lock_guard<std::mutex> lock(mu_);
  file_ = std::move(file);
  buffer_.clear();
  buffer_.reserve(kCapacity);
  stopping_ = false;
  mark_cycles_.store(mark_cycles);
  writer_ = std::thread([this] { Write(); });
  on_.store(true);
  return {};
}

void Timeline::Stop() {
  const std::lock_guard<std::mutex> control(control_);
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (!on()) return;
    on_.store(false);
    stopping_ = true;
  }
  cv_.notify_all();
  writer_.join();
  const std::lock_guard<std::mutex> lock(mu_);
  file_.reset();
  buffer_ = {};
}

void Timeline::Add(Slice slice) {
  const std::lock_guard<std::mutex> lock(mu_);
  if (!on()) return;
  if (buffer_.size() >= kCapacity) {
    ++dropped_;
    return;
  }
  buffer_.push_back(std::move(slice));
  if (buffer_.size() == kCapacity / 2) cv_.notify_one();
}

void Timeline::Add(std::vector<Slice> slices) {
  const std::lock_guard<std::mutex> lock(mu_);
  if (!on()) return;
  if (buffer_.size() + slices.size() > kCapacity) {
    dropped_ += slices.size();
    return;
  }
  const bool half = buffer_.size() >= kCapacity / 2;
  for (Slice& slice : slices) buffer_.push_back(std::move(slice));
  if (!half && buffer_.size() >= kCapacity / 2) cv_.notify_one();
}

void Timeline::Write() {
  std::vector<Slice> mine;
  mine.reserve(kCapacity);
  std::unique_lock<std::mutex> lock(mu_);
  for (;;) {
    cv_.wait_for(lock, kFlushEvery,
                 [this] { return stopping_ || buffer_.size() >= kCapacity / 2; });
    const bool last = stopping_;
    mine.swap(buffer_);
    lock.unlock();
    file_->Write(mine);
    written_ += mine.size();
    mine.clear();
    if (last) break;
    lock.lock();
  }
  file_->End(dropped_.load());
}

}  // namespace sparkvod
