// The dictionary that sparkvod.config.engine_config() makes -> Config.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "native/base/config.h"

namespace sparkvod {

inline Config ConfigFrom(const pybind11::dict& dict) {
  namespace py = pybind11;
  Config config;
  py::dict left = dict.attr("copy")();
  const auto take = [&](const char* name, auto* field) {
    if (!left.contains(name)) return;
    *field = left.attr("pop")(name).template cast<std::decay_t<decltype(*field)>>();
  };
  take("log_level", &config.log_level);
  take("transport", &config.transport);
  take("address", &config.address);
  take("port_range", &config.port_range);
  take("host_id", &config.host_id);
  take("start_timeout", &config.start_timeout);
  take("collective_timeout", &config.collective_timeout);
  take("stall_check_time_seconds", &config.stall_check_time_seconds);
  take("host_timeout", &config.host_timeout);
  take("fusion_threshold", &config.fusion_threshold);
  take("linger_us", &config.linger_us);
  take("one_shot_bytes", &config.one_shot_bytes);
  take("cache_capacity", &config.cache_capacity);
  take("spin_us", &config.spin_us);
  take("staging_bytes", &config.staging_bytes);
  take("allreduce_algorithm", &config.allreduce_algorithm);
  take("broadcast_algorithm", &config.broadcast_algorithm);
  take("tcp_streams", &config.tcp_streams);
  take("tls", &config.tls);
  take("link_gbits", &config.link_gbits);
  take("arena_bytes", &config.arena_bytes);
  if (!left.empty())
    throw py::value_error("the engine knows no knob of these names: " +
                          py::str(left.attr("keys")()).cast<std::string>());
  return config;
}

}  // namespace sparkvod
