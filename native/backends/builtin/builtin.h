// The backend that is always there: our own algorithms over our own transports, for memory of the
// CPU.
#pragma once

#include <memory>

#include "native/backends/backend.h"

namespace sparkvod {

Result MakeBuiltin(Communicator* comm, const Config& config, std::unique_ptr<Backend>* out);

}  // namespace sparkvod
