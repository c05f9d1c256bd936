// How large the arenas of a host's ranks may be where a limit holds for the address space of their
// processes (ulimit -v, spark.executor.pyspark.memory). An arena is as large as the host's memory
// elsewhere: pages that nobody touches cost nothing.
#pragma once

#include <cstdint>
#include <vector>

#include "native/bootstrap/endpoint.h"

namespace sparkvod {

// Bytes that all arenas in this process may take together: half of what the limit leaves now, since
// the application goes on to need some. UINT64_MAX without a limit.
uint64_t AddressSpaceForArenas();

// Sets `not_shared` of ranks that have no address space for the arenas of their host's ranks.
void RefuseLargeArenas(std::vector<Endpoint>* endpoints);
// Lowers `arena_bytes` of each rank to what its process can map, once it is known who shares
// memory.
void FitArenas(std::vector<Endpoint>* endpoints);

}  // namespace sparkvod
