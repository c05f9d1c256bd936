// The kernels of the ops: each hands its tensors to the engine and ends when the engine is done.
#pragma once

#include <string>

#include "native/bindings/table.h"
#include "native/bindings/tensorflow/api.h"

namespace sparkvod::tensorflow {

// Through which the kernels reach the engine; null until Python has given it.
void SetTable(const Table* table);

// Whether TensorFlow passes a kernel's `done` in the form that this library copies; returns why
// not, else "".
std::string CheckDone();

// For KernelBuilder: the same three for all collectives, which differ by the attribute
// "collective".
void* CreateCollective(Construction* construction);
void ComputeCollective(void* kernel, Context* context, Done* done);
void DeleteCollective(void* kernel);

// The op that tells a number of the current world.
void* CreateWorld(Construction* construction);
void ComputeWorld(void* kernel, Context* context);
void DeleteWorld(void* kernel);

}  // namespace sparkvod::tensorflow
