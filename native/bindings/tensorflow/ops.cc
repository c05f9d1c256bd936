// Registers the ops with TensorFlow when tf.load_op_library loads this library.
//
// The ops are not stateful, although they are not pure: TensorFlow runs stateful ops of a
// tf.function one after the other, which would leave nothing to overlap. That they are neither
// folded into constants nor run at another time than their inputs is the work of their first input,
// the token, which the Python side makes so that TensorFlow cannot foresee it. The barrier, which
// has nothing else to order it, is stateful.
#include <string>

#include "native/bindings/tensorflow/api.h"
#include "native/bindings/tensorflow/kernel.h"

namespace sparkvod::tensorflow {
namespace {

void UnknownShape(ShapeContext* context, Status* status) {
  Tf().ShapeInferenceContextSetUnknownShape(context, status);
}

// Of all outputs those of the inputs behind the token.
void SameShapes(ShapeContext* context, Status* status) {
  const auto inputs = static_cast<int>(Tf().ShapeInferenceContextNumInputs(context));
  ShapeHandle* shape = Tf().NewShapeHandle();
  for (int k = 1; k < inputs && Tf().GetCode(status) == kOk; ++k) {
    Tf().ShapeInferenceContextGetInput(context, k, shape, status);
    if (Tf().GetCode(status) == kOk)
      Tf().ShapeInferenceContextSetOutput(context, k - 1, shape, status);
  }
  Tf().DeleteShapeHandle(shape);
}

void NoShapes(ShapeContext*, Status* status) { Tf().SetStatus(status, kOk, ""); }

void* CreateRefusing(Construction*) { return nullptr; }

void Refuse(void*, Context* context) {
  Status* status = Tf().NewStatus();
  Tf().SetStatus(status, kUnimplemented,
                 "sparkvod ValueError: a collective was found in a function that XLA compiles "
                 "(jit_compile=True), which cannot hold it: XLA compiles no code that waits for "
                 "other processes' engines. Leave jit_compile out, or compile the part without "
                 "collectives; for Keras: model.compile(..., jit_compile=False) [sparkvod]");
  Tf().OpKernelContext_Failure(context, status);
  Tf().DeleteStatus(status);
}

void DeleteNothing(void*) {}

struct Definition {
  const char* name;
  int collective;
  bool tensors;  // takes and gives tensors
  bool stateful;
  InferShape infer;
  bool splits = false;  // takes them behind the tensors
  bool rows = false;    // gives how many came from each rank behind the results
};

void Register(const Definition& definition, Status* status) {
  OpBuilder* builder = Tf().NewOpDefinitionBuilder(definition.name);
  Tf().OpDefinitionBuilderAddInput(builder, "token: int64");
  if (definition.tensors) {
    Tf().OpDefinitionBuilderAddAttr(
        builder,
        "T: list({uint8, int8, uint16, int16, int32, int64, half, bfloat16, float, double, bool})");
    Tf().OpDefinitionBuilderAddInput(builder, "tensors: T");
    Tf().OpDefinitionBuilderAddOutput(builder, "results: T");
  }
  if (definition.splits) Tf().OpDefinitionBuilderAddInput(builder, "splits: int64");
  if (definition.rows) Tf().OpDefinitionBuilderAddOutput(builder, "rows: int64");
  const std::string collective = "collective: int = " + std::to_string(definition.collective);
  for (const char* attribute :
       {"tensor_name: string", collective.c_str(), "reduce_op: int = 1", "root_rank: int = 0",
        "process_set: int = 0", "ranks: list(int) = []", "prescale: int = 4607182418800017408",
        "postscale: int = 4607182418800017408"})
    Tf().OpDefinitionBuilderAddAttr(builder, attribute);
  // Any argument makes an op stateful.
  if (definition.stateful) Tf().OpDefinitionBuilderSetIsStateful(builder, true);
  Tf().OpDefinitionBuilderSetShapeInferenceFunction(builder, definition.infer);
  Tf().RegisterOpDefinition(builder, status);
  if (Tf().GetCode(status) != kOk) return;
  Tf().RegisterKernelBuilder(definition.name,
                             Tf().NewAsyncKernelBuilder(definition.name, "CPU", &CreateCollective,
                                                        &ComputeCollective, &DeleteCollective),
                             status);
  for (const char* device : {"XLA_CPU_JIT", "XLA_GPU_JIT"})
    if (Tf().GetCode(status) == kOk)
      Tf().RegisterKernelBuilder(
          definition.name,
          Tf().NewKernelBuilder(definition.name, device, &CreateRefusing, &Refuse, &DeleteNothing),
          status);
}

void RegisterWorld(Status* status) {
  OpBuilder* builder = Tf().NewOpDefinitionBuilder("SparkvodWorld");
  Tf().OpDefinitionBuilderAddInput(builder, "token: int64");
  Tf().OpDefinitionBuilderAddAttr(builder, "what: int");
  Tf().OpDefinitionBuilderAddOutput(builder, "number: int32");
  Tf().OpDefinitionBuilderSetShapeInferenceFunction(builder, &UnknownShape);
  Tf().RegisterOpDefinition(builder, status);
  if (Tf().GetCode(status) == kOk)
    Tf().RegisterKernelBuilder(
        "SparkvodWorld",
        Tf().NewKernelBuilder("SparkvodWorld", "CPU", &CreateWorld, &ComputeWorld, &DeleteWorld),
        status);
}

const Definition kDefinitions[] = {
    {"SparkvodAllreduce", kTableAllreduce, true, false, &SameShapes},
    {"SparkvodAllgather", kTableAllgather, true, false, &UnknownShape, false, true},
    {"SparkvodBroadcast", kTableBroadcast, true, false, &SameShapes},
    {"SparkvodReducescatter", kTableReducescatter, true, false, &UnknownShape},
    {"SparkvodAlltoall", kTableAlltoall, true, false, &UnknownShape, true, true},
    {"SparkvodBarrier", kTableBarrier, false, true, &NoShapes},
};

// Returns why the ops are not there, else "".
std::string RegisterAll() {
  std::string trouble = FindApi();
  if (trouble.empty()) trouble = CheckDone();
  if (!trouble.empty()) return trouble;
  Status* status = Tf().NewStatus();
  for (const Definition& definition : kDefinitions)
    if (Tf().GetCode(status) == kOk) Register(definition, status);
  if (Tf().GetCode(status) == kOk) RegisterWorld(status);
  if (Tf().GetCode(status) != kOk)
    trouble = std::string("TensorFlow refused the ops: ") + Tf().Message(status);
  Tf().DeleteStatus(status);
  return trouble;
}

// TensorFlow looks for new ops after the library's initialisation, so this is where they are made.
std::string trouble = RegisterAll();

}  // namespace
}  // namespace sparkvod::tensorflow

// Connects the library to the extension's table. Returns "", or why it cannot work.
extern "C" __attribute__((visibility("default"))) const char* sparkvod_tensorflow_connect(
    const sparkvod::Table* table) {
  using sparkvod::tensorflow::trouble;
  if (trouble.empty() && table->version != sparkvod::kTableVersion)
    trouble =
        "the extension and the library of the TensorFlow ops are of different builds; "
        "install sparkvod again";
  if (trouble.empty()) sparkvod::tensorflow::SetTable(table);
  return trouble.c_str();
}
