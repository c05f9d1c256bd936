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

// Aborts where a parser refuses what is to be a good input, so that the parser's depths stay in
// reach.
void CheckSeeds();

// Plants a mistake, to see that it is found.
void Plant();

}  // namespace sparkvod::fuzz
