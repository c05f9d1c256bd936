// Drives the fuzz target without libFuzzer: sparkvod_fuzz SECONDS [SEED] mutates good inputs, or
// sparkvod_fuzz FILE feeds one; --seeds FOLDER writes the good ones. An input that breaks it is
// left in crash-input. --planted before them plants a mistake.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <random>
#include <sstream>

#include "tests/fuzz/messages.h"

extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace {

std::string current;

void Leave() {
  std::ofstream("crash-input", std::ios::binary) << current;
  std::fprintf(stderr, "the input was left in crash-input (%zu bytes)\n", current.size());
}

void OnAbort(int) {
  Leave();
  std::_Exit(1);
}

void Feed(const std::string& input) {
  current = input;
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  size_t Below(size_t n) {
    return n == 0 ? 0 : std::uniform_int_distribution<size_t>(0, n - 1)(random_);
  }

  std::string Spoil(std::string text, const std::string& other) {
    // The first byte chooses the parser, and stays.
    for (size_t times = 1 + Below(6); times > 0; --times) {
      const size_t at = text.size() > 1 ? 1 + Below(text.size() - 1) : text.size();
      switch (Below(7)) {
        case 0:
          if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << Below(8)));
          break;
        case 1:
          if (at < text.size()) text[at] = static_cast<char>(Below(256));
          break;
        case 2:
          text.insert(at, Below(9), static_cast<char>(Below(256)));
          break;
        case 3:
          if (at < text.size()) text.erase(at, 1 + Below(16));
          break;
        case 4:
          Overwrite(&text, at);
          break;
        case 5:
          if (other.size() > 1) {
            const size_t from = 1 + Below(other.size() - 1);
            text.insert(at, other, from, 1 + Below(64));
          }
          break;
        default:
          if (at < text.size()) text.resize(at);
      }
    }
    return text;
  }

 private:
  // A number that is likely to be at a limit, in place of what was there.
  void Overwrite(std::string* text, size_t at) {
    static constexpr uint64_t kNumbers[] = {
        0,          1,          0x7f,       0xff,       0xffff,     0x10000, 0x7fffffff, 0x80000000,
        0xffffffff, 1ULL << 47, 1ULL << 48, 1ULL << 62, 1ULL << 63, ~0ULL,   64,         65};
    const uint64_t number = kNumbers[Below(std::size(kNumbers))];
    const size_t bytes = size_t{1} << Below(4);
    if (at + bytes <= text->size()) std::memcpy(text->data() + at, &number, bytes);
  }

  std::mt19937_64 random_;
};

}  // namespace

int main(int argc, char** argv) {
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(Leave);
  std::signal(SIGABRT, OnAbort);
  sparkvod::fuzz::CheckSeeds();
  if (argc > 1 && std::strcmp(argv[1], "--planted") == 0) {
    sparkvod::fuzz::Plant();
    --argc;
    ++argv;
  }
  if (argc == 3 && std::strcmp(argv[1], "--seeds") == 0) {
    int number = 0;
    for (const std::string& input : sparkvod::fuzz::Seeds())
      std::ofstream(std::string(argv[2]) + "/seed" + std::to_string(number++), std::ios::binary)
          << input;
    return 0;
  }
  char* end = nullptr;
  const double seconds = argc > 1 ? std::strtod(argv[1], &end) : 10;
  if (argc > 1 && *end != '\0') {
    std::ifstream file(argv[1], std::ios::binary);
    std::stringstream bytes;
    bytes << file.rdbuf();
    Feed(bytes.str());
    return 0;
  }
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device()();
  std::cout << "seed " << seed << std::endl;
  Mutator mutator(seed);
  const std::vector<std::string> seeds = sparkvod::fuzz::Seeds();
  for (const std::string& input : seeds) Feed(input);
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  uint64_t inputs = 0;
  while (std::chrono::steady_clock::now() < until)
    for (const std::string& input : seeds) {
      Feed(mutator.Spoil(input, seeds[mutator.Below(seeds.size())]));
      ++inputs;
    }
  std::cout << inputs << " inputs, nothing broke" << std::endl;
  return 0;
}
