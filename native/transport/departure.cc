#include "native/transport/departure.h"

#include <algorithm>
#include <string_view>

#include "native/base/wire.h"

namespace sparkvod {
namespace {
// Orderly, relayed, code; the cause's length comes next.
constexpr size_t kFlagBytes = 3;
}  // namespace

std::string Encode(const Departure& how) {
  Writer writer;
  writer.Put<uint8_t>(how.orderly ? 1 : 0);
  writer.Put<uint8_t>(how.relayed ? 1 : 0);
  writer.Put<uint8_t>(static_cast<uint8_t>(how.code));
  writer.PutString(how.cause.substr(0, kCauseLimit));
  return writer.Take();
}

bool Decode(const std::string& heard, bool ended, Departure* how) {
  Reader reader(heard);
  how->orderly = reader.Get<uint8_t>() != 0;
  how->relayed = reader.Get<uint8_t>() != 0;
  how->code = static_cast<Code>(reader.Get<uint8_t>());
  how->cause = reader.GetString(kCauseLimit);
  if (reader.ok()) return true;
  Reader again(std::string_view(heard).substr(std::min(heard.size(), kFlagBytes)));
  const bool endless = again.Get<uint32_t>() > kCauseLimit && again.ok();
  *how = Departure{};
  how->cause = "it left in the middle of a word";
  return ended || endless;
}

Result LeftWhileConnecting(const std::string& who, const Departure& how) {
  return Result::Fail(
      how.code, how.relayed ? how.cause : who + " left while the ranks connected: " + how.cause);
}

}  // namespace sparkvod
