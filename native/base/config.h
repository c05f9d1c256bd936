// The engine's knobs. Defaults live in sparkvod/config.py alone; C++ tests fill the struct
// themselves.
#pragma once

#include <cstdint>
#include <string>

namespace sparkvod {

struct Config {
  std::string log_level = "warning";
  std::string transport = "auto";        // auto | shm | tcp
  std::string address;                   // address, interface or network to listen on; empty: all
  std::string port_range;                // "first-last"; empty: any free port
  std::string host_id;                   // identity of the host; empty: found from the kernel
  double start_timeout = 120;            // s
  double collective_timeout = 600;       // s; 0: for ever
  double stall_check_time_seconds = 60;  // s; 0: never
  double host_timeout = 60;              // s; 0: as the system has it
  int64_t fusion_threshold = 64 << 20;   // bytes
  int64_t linger_us = 300;               // us
  int64_t one_shot_bytes = 32 << 10;     // bytes
  int64_t cache_capacity = 1024;         // entries
  int64_t spin_us = 50;                  // us
  int64_t staging_bytes = 4 << 20;       // bytes
  std::string allreduce_algorithm = "auto", broadcast_algorithm = "auto";
  int64_t tcp_streams = 1;  // between two ranks
  bool tls = false;         // whether they are encrypted
  double link_gbits = 10;   // 10^9 bits per second
  int64_t arena_bytes = 0;  // bytes; 0: the size of the host's memory
};

}  // namespace sparkvod
