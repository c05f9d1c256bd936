#include "native/bindings/tensorflow/api.h"

#include <dlfcn.h>

#include <cstring>
#include <vector>

namespace sparkvod::tensorflow {
namespace {

Api api{};

// TensorFlow may have loaded its libraries for itself only, then the default search misses them.
std::vector<void*> Libraries() {
  std::vector<void*> libraries{RTLD_DEFAULT};
  for (const char* name :
       {"libtensorflow_framework.so.2", "libtensorflow_cc.so.2", "libtensorflow.so.2"})
    if (void* library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD)) libraries.push_back(library);
  return libraries;
}

}  // namespace

std::string FindApi() {
  const std::vector<void*> libraries = Libraries();
  std::string missing;
  const auto find = [&](const char* name, auto* function) {
    void* found = nullptr;
    for (size_t k = 0; k < libraries.size() && found == nullptr; ++k)
      found = dlsym(libraries[k], name);
    if (found == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(name);
    std::memcpy(function, &found, sizeof found);
  };
#define SPARKVOD_FIND(name) find("TF_" #name, &api.name)
  SPARKVOD_FIND(NewStatus);
  SPARKVOD_FIND(DeleteStatus);
  SPARKVOD_FIND(SetStatus);
  SPARKVOD_FIND(GetCode);
  SPARKVOD_FIND(Message);
  SPARKVOD_FIND(NewTensor);
  SPARKVOD_FIND(DeleteTensor);
  SPARKVOD_FIND(TensorType);
  SPARKVOD_FIND(NumDims);
  SPARKVOD_FIND(Dim);
  SPARKVOD_FIND(TensorData);
  SPARKVOD_FIND(TensorByteSize);
  SPARKVOD_FIND(NewOpDefinitionBuilder);
  SPARKVOD_FIND(OpDefinitionBuilderAddAttr);
  SPARKVOD_FIND(OpDefinitionBuilderAddInput);
  SPARKVOD_FIND(OpDefinitionBuilderAddOutput);
  SPARKVOD_FIND(OpDefinitionBuilderSetIsStateful);
  SPARKVOD_FIND(OpDefinitionBuilderSetShapeInferenceFunction);
  SPARKVOD_FIND(RegisterOpDefinition);
  SPARKVOD_FIND(ShapeInferenceContextNumInputs);
  SPARKVOD_FIND(NewShapeHandle);
  SPARKVOD_FIND(DeleteShapeHandle);
  SPARKVOD_FIND(ShapeInferenceContextGetInput);
  SPARKVOD_FIND(ShapeInferenceContextSetOutput);
  SPARKVOD_FIND(ShapeInferenceContextSetUnknownShape);
  SPARKVOD_FIND(NewKernelBuilder);
  SPARKVOD_FIND(NewAsyncKernelBuilder);
  SPARKVOD_FIND(RegisterKernelBuilder);
  SPARKVOD_FIND(RunAsyncOpKernelDoneCallback);
  SPARKVOD_FIND(OpKernelConstruction_GetAttrSize);
  SPARKVOD_FIND(OpKernelConstruction_GetAttrString);
  SPARKVOD_FIND(OpKernelConstruction_GetAttrInt64);
  SPARKVOD_FIND(OpKernelConstruction_GetAttrInt64List);
  SPARKVOD_FIND(OpKernelConstruction_Failure);
  SPARKVOD_FIND(NumInputs);
  SPARKVOD_FIND(GetInput);
  SPARKVOD_FIND(AllocateOutput);
  SPARKVOD_FIND(ForwardInputOrAllocateOutput);
  SPARKVOD_FIND(SetOutput);
  SPARKVOD_FIND(OpKernelContext_Failure);
#undef SPARKVOD_FIND
  if (missing.empty()) return "";
  return "TensorFlow's C API lacks " + missing +
         "; TensorFlow 2.13 or newer was expected, loaded before this library";
}

const Api& Tf() { return api; }

}  // namespace sparkvod::tensorflow
