// TensorFlow's C API as far as the ops need it, declared here so that no header of TensorFlow is
// needed and one build serves all its versions. The functions are looked up at load among the
// libraries that TensorFlow has loaded.
//
// The declarations follow the interface that TensorFlow documents as stable (its C API, and the C
// API for kernels and ops).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace sparkvod::tensorflow {

struct Status;
struct Tensor;
struct OpBuilder;
struct KernelBuilder;
struct Construction;
struct Context;
struct ShapeContext;
struct ShapeHandle;
struct Done;  // a std::function<void()> of TensorFlow's

// TF_Code
enum StatusCode : int {
  kOk = 0,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kFailedPrecondition = 9,
  kAborted = 10,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
};

using Deallocator = void (*)(void* data, size_t bytes, void* argument);
using Create = void* (*)(Construction*);
using ComputeAsync = void (*)(void* kernel, Context*, Done*);
using Compute = void (*)(void* kernel, Context*);
using Delete = void (*)(void* kernel);
using InferShape = void (*)(ShapeContext*, Status*);

struct Api {
  Status* (*NewStatus)();
  void (*DeleteStatus)(Status*);
  void (*SetStatus)(Status*, int code, const char* message);
  int (*GetCode)(const Status*);
  const char* (*Message)(const Status*);

  Tensor* (*NewTensor)(int dtype, const int64_t* dims, int num_dims, void* data, size_t bytes,
                       Deallocator deallocator, void* argument);
  void (*DeleteTensor)(Tensor*);
  int (*TensorType)(const Tensor*);
  int (*NumDims)(const Tensor*);
  int64_t (*Dim)(const Tensor*, int dim);
  void* (*TensorData)(const Tensor*);
  size_t (*TensorByteSize)(const Tensor*);

  OpBuilder* (*NewOpDefinitionBuilder)(const char* name);
  void (*OpDefinitionBuilderAddAttr)(OpBuilder*, const char* spec);
  void (*OpDefinitionBuilderAddInput)(OpBuilder*, const char* spec);
  void (*OpDefinitionBuilderAddOutput)(OpBuilder*, const char* spec);
  void (*OpDefinitionBuilderSetIsStateful)(OpBuilder*, bool);
  void (*OpDefinitionBuilderSetShapeInferenceFunction)(OpBuilder*, InferShape);
  void (*RegisterOpDefinition)(OpBuilder*, Status*);

  int64_t (*ShapeInferenceContextNumInputs)(ShapeContext*);
  ShapeHandle* (*NewShapeHandle)();
  void (*DeleteShapeHandle)(ShapeHandle*);
  void (*ShapeInferenceContextGetInput)(ShapeContext*, int, ShapeHandle*, Status*);
  void (*ShapeInferenceContextSetOutput)(ShapeContext*, int, ShapeHandle*, Status*);
  void (*ShapeInferenceContextSetUnknownShape)(ShapeContext*, Status*);

  KernelBuilder* (*NewKernelBuilder)(const char* op, const char* device, Create, Compute, Delete);
  KernelBuilder* (*NewAsyncKernelBuilder)(const char* op, const char* device, Create, ComputeAsync,
                                          Delete);
  void (*RegisterKernelBuilder)(const char* name, KernelBuilder*, Status*);
  void (*RunAsyncOpKernelDoneCallback)(Done*);

  void (*OpKernelConstruction_GetAttrSize)(Construction*, const char* name, int32_t* list_size,
                                           int32_t* total_size, Status*);
  void (*OpKernelConstruction_GetAttrString)(Construction*, const char* name, char* value,
                                             size_t most, Status*);
  void (*OpKernelConstruction_GetAttrInt64)(Construction*, const char* name, int64_t* value,
                                            Status*);
  void (*OpKernelConstruction_GetAttrInt64List)(Construction*, const char* name, int64_t* values,
                                                int most, Status*);
  void (*OpKernelConstruction_Failure)(Construction*, Status*);

  int (*NumInputs)(Context*);
  void (*GetInput)(Context*, int index, Tensor**, Status*);
  Tensor* (*AllocateOutput)(Context*, int index, int dtype, const int64_t* dims, int num_dims,
                            size_t bytes, Status*);
  Tensor* (*ForwardInputOrAllocateOutput)(Context*, const int* candidates, int num_candidates,
                                          int output, const int64_t* dims, int num_dims,
                                          int* forwarded, Status*);
  void (*SetOutput)(Context*, int index, const Tensor*, Status*);
  void (*OpKernelContext_Failure)(Context*, Status*);
};

// Finds the functions; returns why it cannot, in words, else "".
std::string FindApi();

// They, once FindApi has found them.
const Api& Tf();

}  // namespace sparkvod::tensorflow
