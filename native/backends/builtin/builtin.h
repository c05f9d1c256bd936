// The backend that is always there: our own algorithms over our own transports, for memory of the
// CPU.
#pragma once

#include <memory>

#include "native/backends/backend.h"

namespace sparkvod {

std::unique_ptr<Backend> MakeBuiltin(Communicator* comm, const Config& config);

}  // namespace sparkvod
