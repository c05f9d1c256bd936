// A relay between a rank and those that connect to it: passes their bytes on, slowly, not at all
// or mutated, as a test asks for.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "native/transport/fd.h"

namespace sparkvod::check {

class Relay {
 public:
  enum class Mutation { kNone, kFlip, kInsert, kDrop, kRepeat, kGarble, kCut };
  // One direction. Bytes that were not read lie in the sender's kernel.
  struct Way {
    std::atomic<size_t> piece{1 << 20};  // bytes that are read at a time
    std::atomic<int> pause_us{0};        // between two pieces
    std::atomic<bool> stopped{false};    // nothing is read
    std::atomic<size_t> passed{0};

    // Mutates the stream once, at the byte that comes after `skip` more: flips its lowest bit, or
    // inserts, drops, repeats or overwrites `length` bytes there, or ends the stream.
    void Mutate(Mutation kind, size_t skip, size_t length = 100);

   private:
    friend class Relay;
    void Apply(std::string* piece, bool* ended);
    std::atomic<Mutation> mutation_{Mutation::kNone};
    std::atomic<size_t> skip_{0}, length_{0};
  };

  // Listens in place of the rank whose endpoint this is; stops when it is destroyed.
  explicit Relay(const std::string& endpoint);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // The rank's endpoint, for those that are to come this way.
  const std::string& endpoint() const { return endpoint_; }
  Way inward, outward;  // to the rank, and from it

 private:
  struct Pipe {
    int from, to;
    Way* way;
    std::string held = {};
    int64_t next_ns = 0;
    bool ended = false;
  };
  void Run();
  void AcceptOne();
  bool Pass(Pipe* pipe);

  std::string endpoint_;
  int port_ = 0;  // of the rank
  Fd listener_;
  std::vector<Fd> sockets_;
  std::vector<std::unique_ptr<Pipe>> pipes_;
  std::atomic<bool> over_{false};
  std::thread thread_;
};

}  // namespace sparkvod::check
