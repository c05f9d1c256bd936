// The fuzz target and what it starts from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// Feeds one input to the parser that its first byte names.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace sparkvod::fuzz {

// Good inputs for every parser, which mutations spoil.
std::vector<std::string> Seeds();

}  // namespace sparkvod::fuzz
