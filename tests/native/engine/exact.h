// Allreduces whose results are known to the last bit, in every dtype and operation, on worlds of up
// to 64 ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/native/world.h"

namespace sparkvod::check {

extern const std::vector<DType> kReduced;  // all that there are
extern const std::vector<ReduceOp> kOps;   // all that combine elements one by one
bool Supported(DType dtype, ReduceOp op);

// What a rank of a world of `size` gives to the operation: small whole numbers, negative ones among
// them where there are such.
std::vector<uint8_t> Input(DType dtype, ReduceOp op, int size, int rank, size_t count);
// What the operation makes of all ranks' inputs.
std::vector<uint8_t> Expected(DType dtype, ReduceOp op, int size, size_t count);

// Bytes where a test wants them.
class Block {
 public:
  Block(Engine& engine, bool in_engine, const std::vector<uint8_t>& bytes);
  void* data() { return memory_ ? static_cast<void*>(memory_->data()) : own_.data(); }
  bool Holds(const std::vector<uint8_t>& bytes);

 private:
  std::shared_ptr<Memory> memory_;
  std::vector<uint8_t> own_;
};

// Whether a block of so many elements is left out: a sanitizer maps the shadow of a large one anew
// each time, page by page, so it goes through those of float32 only.
inline bool LeftOut(DType dtype, size_t count) {
  return kSanitized && dtype != DType::kFloat32 && count * SizeOf(dtype) > (200 << 10);
}

enum class Place { kInPlace, kApart, kEngine };
constexpr Place kPlaces[] = {Place::kInPlace, Place::kApart, Place::kEngine};

// Whether a place is left out: a sanitizer goes through one of them for each size, dtype and
// operation, so that every size with every dtype, and every dtype with every operation, meets all
// of them.
inline bool OtherPlace(DType dtype, ReduceOp op, size_t count, Place place) {
  const size_t turn = static_cast<size_t>(dtype) + static_cast<size_t>(op) + count;
  return kSanitized && static_cast<size_t>(place) != turn % 3;
}

// One allreduce of one rank, checked.
void CheckAllreduce(Engine& engine, DType dtype, size_t count, Place place, ReduceOp op);

}  // namespace sparkvod::check
