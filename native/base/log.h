// Lines on standard error, by level. The level travels with its owner: there is no global logger.
#pragma once

#include <cstdio>
#include <string>

namespace sparkvod {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

class Logger {
 public:
  Logger() = default;
  Logger(const std::string& level, std::string who) : who_(std::move(who)) {
    level_ = level == "debug"   ? LogLevel::kDebug
             : level == "info"  ? LogLevel::kInfo
             : level == "error" ? LogLevel::kError
                                : LogLevel::kWarning;
  }
  void Info(const std::string& text) const { Write(LogLevel::kInfo, "INFO", text); }
  void Warning(const std::string& text) const { Write(LogLevel::kWarning, "WARNING", text); }

 private:
  void Write(LogLevel level, const char* name, const std::string& text) const {
    if (level >= level_)
      std::fprintf(stderr, "%s sparkvod.engine[%s]: %s\n", name, who_.c_str(), text.c_str());
  }
  LogLevel level_ = LogLevel::kWarning;
  std::string who_;
};

}  // namespace sparkvod
