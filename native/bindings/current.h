// The engine of this process's current world, for ops that frameworks run on threads of their own.
#pragma once

#include <memory>

#include "native/bindings/table.h"
#include "native/engine/engine.h"

namespace sparkvod {

// Makes it the current one; null: there is none. With the GIL held.
void SetCurrent(std::shared_ptr<Engine> engine);

// The table for ops' libraries; it lives as long as the process.
const Table& OpsTable();

}  // namespace sparkvod
