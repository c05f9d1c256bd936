// Fixed-width little-endian encoding with bounds checks. A Reader that meets the end, or a length
// over its limit, turns bad and yields zeros; callers check ok() once at the end.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

namespace sparkvod {

class Writer {
 public:
  template <typename T>
  void Put(T value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void PutString(std::string_view text) {
    Put<uint32_t>(static_cast<uint32_t>(text.size()));
    bytes_.append(text);
  }
  const std::string& bytes() const { return bytes_; }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  template <typename T>
  T Get() {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    T value{};
    if (bytes_.size() - at_ < sizeof value) {
      ok_ = false;
      at_ = bytes_.size();
      return value;
    }
    std::memcpy(&value, bytes_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  std::string GetString(size_t limit) {
    const size_t length = Get<uint32_t>();
    if (length > limit || bytes_.size() - at_ < length) {
      ok_ = false;
      return {};
    }
    std::string text(bytes_.substr(at_, length));
    at_ += length;
    return text;
  }
  // Reads a count of items that take at least `item_bytes` each.
  size_t GetCount(size_t item_bytes) {
    const size_t count = Get<uint32_t>();
    if (count * item_bytes > bytes_.size() - at_) {
      ok_ = false;
      return 0;
    }
    return count;
  }
  bool ok() const { return ok_; }
  bool AtEnd() const { return at_ == bytes_.size(); }

 private:
  std::string_view bytes_;
  size_t at_ = 0;
  bool ok_ = true;
};

}  // namespace sparkvod
