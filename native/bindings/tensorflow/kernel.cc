#include "native/bindings/tensorflow/kernel.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

namespace sparkvod::tensorflow {
namespace {

std::atomic<const Table*> table{nullptr};

// TF_DataType by the engine's code.
constexpr int kTypes[] = {4, 6, 17, 5, 3, 9, 19, 14, 1, 2, 10};

int CodeOf(int type) {
  for (int code = 0; code < static_cast<int>(sizeof kTypes / sizeof *kTypes); ++code)
    if (kTypes[code] == type) return code;
  return -1;
}

struct StatusHolder {
  StatusHolder() : status(Tf().NewStatus()) {}
  ~StatusHolder() { Tf().DeleteStatus(status); }
  StatusHolder(const StatusHolder&) = delete;
  StatusHolder& operator=(const StatusHolder&) = delete;
  bool ok() const { return Tf().GetCode(status) == kOk; }
  Status* const status;
};

struct TensorDeleter {
  void operator()(Tensor* tensor) const { Tf().DeleteTensor(tensor); }
};
using TensorHolder = std::unique_ptr<Tensor, TensorDeleter>;

// What the attributes of an op's node say.
struct Collective {
  std::string name;
  int64_t collective = 0, op = 0, root = 0, process_set = 0;
  std::vector<int64_t> ranks;  // of the process set, sorted; none: all
  double prescale = 1, postscale = 1;
};

// A collective on its way: ends with its completion.
struct Running {
  Context* context;
  std::function<void()> done;
  int32_t collective;
  int64_t member = 0, members = 1;  // this rank's place in the process set, and the set's size
  std::vector<TensorHolder> inputs, outputs;
  std::vector<std::vector<int64_t>> shapes;
  std::vector<TableTensor> tensors;

  void Fail(int code, const std::string& message) {
    StatusHolder failure;
    Tf().SetStatus(failure.status, code, message.c_str());
    Tf().OpKernelContext_Failure(context, failure.status);
  }
  // What must be gone before TensorFlow goes on: it may free what they belong to.
  void End() {
    inputs.clear();
    outputs.clear();
    const std::function<void()> last = std::move(done);
    last();
  }
};

int StatusOf(const char* error) {
  const std::string name = error;
  if (name == "ValueError") return kInvalidArgument;
  if (name == "MismatchError" || name == "NotInitializedError") return kFailedPrecondition;
  if (name == "PeerLostError") return kUnavailable;
  if (name == "CollectiveTimeoutError") return kDeadlineExceeded;
  if (name == "ShutDownError") return kAborted;
  return kInternal;
}

void Release(void*, size_t, void* owner) { table.load()->release(owner); }

// Whether the engine makes the output, because only it knows how many rows there will be.
bool EngineMakes(int32_t collective) {
  return collective == kTableAllgather || collective == kTableAlltoall;
}

// Hands engine memory to TensorFlow as it is.
void SetOutput(Running* running, int index, TableOutput* output) {
  std::vector<int64_t> shape = running->shapes[static_cast<size_t>(index)];
  shape[0] = std::accumulate(output->rows, output->rows + output->ranks, int64_t{0});
  const TableTensor& tensor = running->tensors[static_cast<size_t>(index)];
  StatusHolder status;
  TensorHolder made;
  if (output->bytes > 0) {
    made.reset(Tf().NewTensor(kTypes[tensor.dtype], shape.data(), static_cast<int>(shape.size()),
                              output->data, static_cast<size_t>(output->bytes), &Release,
                              output->owner));
    output->owner = nullptr;
    Tf().SetOutput(running->context, index, made.get(), status.status);
  } else {
    made.reset(Tf().AllocateOutput(running->context, index, kTypes[tensor.dtype], shape.data(),
                                   static_cast<int>(shape.size()), 0, status.status));
  }
  if (!status.ok()) Tf().OpKernelContext_Failure(running->context, status.status);
}

// The last output of allgather and alltoall: how many rows came from each rank, tensor by tensor.
void SetRows(Running* running, const TableOutcome& outcome) {
  std::vector<int64_t> rows;
  for (int32_t k = 0; k < outcome.outputs; ++k)
    rows.insert(rows.end(), outcome.output[k].rows,
                outcome.output[k].rows + outcome.output[k].ranks);
  const auto count = static_cast<int64_t>(rows.size());
  StatusHolder status;
  const TensorHolder output(Tf().AllocateOutput(running->context, outcome.outputs, kTypes[5],
                                                &count, 1, rows.size() * sizeof(int64_t),
                                                status.status));
  if (!status.ok()) return Tf().OpKernelContext_Failure(running->context, status.status);
  std::memcpy(Tf().TensorData(output.get()), rows.data(), rows.size() * sizeof(int64_t));
}

void Ended(void* context, TableOutcome* outcome) {
  const std::unique_ptr<Running> running(static_cast<Running*>(context));
  if (outcome->error != nullptr)
    running->Fail(StatusOf(outcome->error), "sparkvod " + std::string(outcome->error) + ": " +
                                                outcome->message + " [sparkvod]");
  else
    for (int32_t k = 0; k < outcome->outputs; ++k) SetOutput(running.get(), k, &outcome->output[k]);
  if (outcome->error == nullptr && EngineMakes(running->collective))
    SetRows(running.get(), *outcome);
  running->End();
}

std::string StringAttr(Construction* construction, const char* name, Status* status) {
  int32_t list = 0, size = 0;
  Tf().OpKernelConstruction_GetAttrSize(construction, name, &list, &size, status);
  if (Tf().GetCode(status) != kOk) return "";
  std::string value(static_cast<size_t>(size), '\0');
  Tf().OpKernelConstruction_GetAttrString(construction, name, value.data(), value.size(), status);
  return value;
}

// Attributes have no doubles: they come as the 64 bits.
double DoubleAttr(Construction* construction, const char* name, Status* status) {
  int64_t bits = 0;
  Tf().OpKernelConstruction_GetAttrInt64(construction, name, &bits, status);
  double value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

std::vector<int64_t> ListAttr(Construction* construction, const char* name, Status* status) {
  int32_t size = 0, bytes = 0;
  Tf().OpKernelConstruction_GetAttrSize(construction, name, &size, &bytes, status);
  if (Tf().GetCode(status) != kOk) return {};
  std::vector<int64_t> values(static_cast<size_t>(size));
  Tf().OpKernelConstruction_GetAttrInt64List(construction, name, values.data(), size, status);
  return values;
}

// Finds this rank's place, when the op runs: the graph may have been saved by another rank.
void FindPlace(const Collective& collective, const Table& engine, Running* running) {
  const int64_t rank = engine.world(kTableRank), size = engine.world(kTableSize);
  if (size < 1) return;  // the engine says that there is no world
  running->member = rank;
  running->members = size;
  const std::vector<int64_t>& ranks = collective.ranks;
  if (ranks.empty()) return;
  // Of a rank outside the set, the engine says so.
  running->member = std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin();
  running->members = static_cast<int64_t>(ranks.size());
}

// This rank's rows of `rows` that are scattered: the first ranks get one more.
int64_t ShareOf(const Running& running, int64_t rows) {
  return rows / running.members + (running.member < rows % running.members ? 1 : 0);
}

size_t ItemBytes(const Tensor* tensor) {
  int64_t count = 1;
  for (int d = 0; d < Tf().NumDims(tensor); ++d) count *= Tf().Dim(tensor, d);
  return count == 0 ? 0 : Tf().TensorByteSize(tensor) / static_cast<size_t>(count);
}

// Takes input `k` and makes the output that belongs to it, the same memory where nobody else needs
// it.
bool Take(Running* running, int k, int inputs_before) {
  StatusHolder status;
  Tensor* given = nullptr;
  Tf().GetInput(running->context, inputs_before + k, &given, status.status);
  TensorHolder input(given);
  if (!status.ok()) {
    Tf().OpKernelContext_Failure(running->context, status.status);
    return false;
  }
  std::vector<int64_t> shape;
  for (int d = 0; d < Tf().NumDims(given); ++d) shape.push_back(Tf().Dim(given, d));
  const int type = Tf().TensorType(given);
  void* out = nullptr;
  if (running->collective == kTableReducescatter) {
    std::vector<int64_t> share = shape;
    if (!share.empty()) share[0] = ShareOf(*running, shape[0]);
    int64_t bytes = static_cast<int64_t>(ItemBytes(given));
    for (const int64_t d : share) bytes *= d;
    TensorHolder output(Tf().AllocateOutput(running->context, k, type, share.data(),
                                            static_cast<int>(share.size()),
                                            static_cast<size_t>(bytes), status.status));
    if (!status.ok()) {
      Tf().OpKernelContext_Failure(running->context, status.status);
      return false;
    }
    out = Tf().TensorData(output.get());
    running->outputs.push_back(std::move(output));
  } else if (!EngineMakes(running->collective)) {
    input.reset();  // else it would count as needed
    const int candidate = inputs_before + k;
    int forwarded = -1;
    TensorHolder output(Tf().ForwardInputOrAllocateOutput(
        running->context, &candidate, 1, k, shape.data(), static_cast<int>(shape.size()),
        &forwarded, status.status));
    if (status.ok() && forwarded < 0) {
      Tf().GetInput(running->context, inputs_before + k, &given, status.status);
      input.reset(given);
    }
    if (!status.ok()) {
      Tf().OpKernelContext_Failure(running->context, status.status);
      return false;
    }
    out = Tf().TensorData(output.get());
    running->outputs.push_back(std::move(output));
  }
  const void* in = input != nullptr ? Tf().TensorData(input.get()) : out;
  if (input != nullptr) running->inputs.push_back(std::move(input));
  running->shapes.push_back(std::move(shape));
  running->tensors.push_back({in, out, CodeOf(type), 0, nullptr});
  return true;
}

}  // namespace

void SetTable(const Table* given) { table.store(given); }

std::string CheckDone() {
  static_assert(sizeof(std::function<void()>) == 4 * sizeof(void*),
                "libstdc++ was expected, whose std::function TensorFlow's builds have");
  bool called = false;
  const std::function<void()> probe = [&called] { called = true; };
  std::function<void()> copy = probe;
  Tf().RunAsyncOpKernelDoneCallback(reinterpret_cast<Done*>(&copy));
  return called ? ""
                : "TensorFlow was built with another layout of std::function than this library; a "
                  "TensorFlow of PyPI, built with libstdc++, was expected";
}

void* CreateCollective(Construction* construction) {
  StatusHolder status;
  auto made = std::make_unique<Collective>();
  const auto number = [&](const char* name, int64_t* value) {
    if (status.ok())
      Tf().OpKernelConstruction_GetAttrInt64(construction, name, value, status.status);
  };
  made->name = StringAttr(construction, "tensor_name", status.status);
  number("collective", &made->collective);
  number("reduce_op", &made->op);
  number("root_rank", &made->root);
  number("process_set", &made->process_set);
  if (status.ok()) made->ranks = ListAttr(construction, "ranks", status.status);
  if (status.ok()) made->prescale = DoubleAttr(construction, "prescale", status.status);
  if (status.ok()) made->postscale = DoubleAttr(construction, "postscale", status.status);
  if (!status.ok()) Tf().OpKernelConstruction_Failure(construction, status.status);
  return made.release();
}

void ComputeCollective(void* kernel, Context* context, Done* done) {
  const Collective& self = *static_cast<Collective*>(kernel);
  // TensorFlow's function object lies on the caller's stack: copied before this returns.
  auto running = std::make_unique<Running>();
  running->context = context;
  running->done = *reinterpret_cast<std::function<void()>*>(done);
  running->collective = static_cast<int32_t>(self.collective);
  const Table* engine = table.load();
  if (engine == nullptr) {
    running->Fail(kFailedPrecondition,
                  "sparkvod NotInitializedError: the library was not connected "
                  "to the engine; import sparkvod.tensorflow [sparkvod]");
    return running->End();
  }
  FindPlace(self, *engine, running.get());
  const bool splits = running->collective == kTableAlltoall;
  // The token comes first, splits last.
  const int tensors = Tf().NumInputs(context) - 1 - (splits ? 1 : 0);
  for (int k = 0; k < tensors; ++k)
    if (!Take(running.get(), k, 1)) return running->End();
  TensorHolder split;
  if (splits) {
    StatusHolder status;
    Tensor* given = nullptr;
    Tf().GetInput(context, 1 + tensors, &given, status.status);
    split.reset(given);
    if (!status.ok()) {
      Tf().OpKernelContext_Failure(context, status.status);
      return running->End();
    }
  }
  for (size_t k = 0; k < running->tensors.size(); ++k) {
    running->tensors[k].dims = static_cast<int32_t>(running->shapes[k].size());
    running->tensors[k].shape = running->shapes[k].data();
  }
  TableCall call{};
  call.name = self.name.c_str();
  call.collective = running->collective;
  call.op = static_cast<int32_t>(self.op);
  call.root = static_cast<int32_t>(self.root);
  call.process_set = static_cast<int32_t>(self.process_set);
  call.tensors = static_cast<int32_t>(running->tensors.size());
  call.tensor = running->tensors.data();
  call.prescale = self.prescale;
  call.postscale = self.postscale;
  if (split != nullptr) {
    call.splits = static_cast<int32_t>(Tf().TensorByteSize(split.get()) / sizeof(int64_t));
    call.split = static_cast<const int64_t*>(Tf().TensorData(split.get()));
  }
  call.done = &Ended;
  call.context = running.release();  // Ended takes it back, perhaps before submit returns
  engine->submit(&call);
}

void DeleteCollective(void* kernel) { delete static_cast<Collective*>(kernel); }

void* CreateWorld(Construction* construction) {
  StatusHolder status;
  auto what = std::make_unique<int64_t>(0);
  Tf().OpKernelConstruction_GetAttrInt64(construction, "what", what.get(), status.status);
  if (!status.ok()) Tf().OpKernelConstruction_Failure(construction, status.status);
  return what.release();
}

void ComputeWorld(void* kernel, Context* context) {
  StatusHolder status;
  const TensorHolder output(
      Tf().AllocateOutput(context, 0, kTypes[4], nullptr, 0, sizeof(int32_t), status.status));
  const Table* engine = table.load();
  const int32_t number =
      engine == nullptr ? -1 : engine->world(static_cast<int32_t>(*static_cast<int64_t*>(kernel)));
  if (status.ok() && number < 0)
    Tf().SetStatus(status.status, kFailedPrecondition,
                   "sparkvod NotInitializedError: no world was found, init() was expected to have "
                   "been called; call it first [sparkvod]");
  if (!status.ok()) return Tf().OpKernelContext_Failure(context, status.status);
  std::memcpy(Tf().TensorData(output.get()), &number, sizeof number);
}

void DeleteWorld(void* kernel) { delete static_cast<int64_t*>(kernel); }

}  // namespace sparkvod::tensorflow
