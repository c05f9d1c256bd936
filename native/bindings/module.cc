// sparkvod._native: converts and throws, no logic. The documentation of the calls is in
// sparkvod/_native.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "native/bindings/config.h"
#include "native/bindings/current.h"
#include "native/bindings/errors.h"
#include "native/bindings/exchange.h"
#include "native/bindings/tunables.h"
#include "native/engine/engine.h"
#include "native/kernels/reduce.h"

namespace py = pybind11;

namespace sparkvod {
namespace {

using Shape = std::vector<int64_t>;
// input, output (addresses), count, dtype, shape
using PyEntry = std::tuple<uintptr_t, uintptr_t, int64_t, int, Shape>;

bool SignalPending() {
  py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;  // leaves the handler's exception set, for Throw
}

// An interpreter that ends lets no other thread go on: where one takes the GIL again it is ended,
// by unwinding, which must not begin in a destructor.
template <typename F>
auto WithoutGil(F call) -> decltype(call()) {
  std::optional<decltype(call())> result;
  std::exception_ptr thrown;
  PyThreadState* const state = PyEval_SaveThread();
  try {
    result.emplace(call());
  } catch (const std::exception&) {
    thrown = std::current_exception();
  }
  PyEval_RestoreThread(state);
  if (thrown) std::rethrow_exception(thrown);
  return std::move(*result);
}

DType DTypeFrom(int code) {
  if (!IsDType(code)) throw py::value_error("dtype code " + std::to_string(code) + " is unknown");
  return static_cast<DType>(code);
}

ReduceOp OpFrom(int code) {
  if (!IsReduceOp(code))
    throw py::value_error("reduce operation " + std::to_string(code) +
                          " was found; 0 (Average), 1 (Sum), 2 (Adasum), 3 (Min), 4 (Max) or 5 "
                          "(Product) was expected");
  return static_cast<ReduceOp>(code);
}

void Add(Request* request, std::vector<Part>* parts, uintptr_t input, uintptr_t output,
         int64_t count, int dtype, Shape shape) {
  if (count < 0)
    throw py::value_error("a count of " + std::to_string(count) + " elements is negative");
  Entry entry;
  entry.dtype = DTypeFrom(dtype);
  entry.shape = shape.empty() ? Shape{count} : std::move(shape);
  if (entry.count() != count)
    throw py::value_error("the shape of '" + request->name + "' has " +
                          std::to_string(entry.count()) + " elements, its count says " +
                          std::to_string(count));
  request->entries.push_back(std::move(entry));
  parts->push_back({reinterpret_cast<const void*>(input), reinterpret_cast<void*>(output),
                    static_cast<size_t>(count)});
}

// A tensor of at least one dimension; Admit refuses another.
void AddRows(Request* request, std::vector<Part>* parts, uintptr_t input, uintptr_t output,
             Shape shape, int dtype) {
  Entry entry{DTypeFrom(dtype), std::move(shape)};
  for (const int64_t d : entry.shape)
    if (d < 0) throw py::value_error("a dimension of " + std::to_string(d) + " is negative");
  parts->push_back({reinterpret_cast<const void*>(input), reinterpret_cast<void*>(output),
                    static_cast<size_t>(entry.count())});
  request->entries.push_back(std::move(entry));
}

int64_t Submit(Engine& engine, Request request, std::vector<Part> parts, bool wake) {
  int64_t handle = 0;
  ThrowIfFailed(engine.Submit(std::move(request), std::move(parts), wake, &handle));
  return handle;
}

Request Named(std::string name, Collective collective, int process_set = 0) {
  Request request;
  request.process_set = process_set;
  request.name = std::move(name);
  request.collective = collective;
  return request;
}

Request Reducing(std::string name, int op, double prescale, double postscale, int process_set,
                 Collective collective = Collective::kAllreduce) {
  Request request = Named(std::move(name), collective, process_set);
  request.op = OpFrom(op);
  request.prescale = prescale;
  request.postscale = postscale;
  return request;
}

// In place; nothing is submitted where the exchange cannot tell how the tensor lies.
std::optional<int64_t> AllreduceTensor(Engine& engine, std::string name, py::handle tensor,
                                       const Exchange& exchange, int op, double prescale,
                                       double postscale, bool wake, int process_set) {
  Request request = Reducing(std::move(name), op, prescale, postscale, process_set);
  request.entries.resize(1);
  std::vector<Part> parts(1);
  Entry& entry = request.entries[0];
  if (!exchange.Look(tensor, &entry, &parts[0])) return std::nullopt;
  if (entry.shape.empty()) entry.shape = {1};  // as Add has it
  return Submit(engine, std::move(request), std::move(parts), wake);
}

int64_t GroupedAllreduce(Engine& engine, std::string name, std::vector<PyEntry> entries, int op,
                         double prescale, double postscale, bool wake, int process_set) {
  Request request = Reducing(std::move(name), op, prescale, postscale, process_set);
  std::vector<Part> parts;
  for (auto& [input, output, count, dtype, shape] : entries)
    Add(&request, &parts, input, output, count, dtype, std::move(shape));
  return Submit(engine, std::move(request), std::move(parts), wake);
}

int64_t GroupedAllgather(Engine& engine, std::string name,
                         std::vector<std::tuple<uintptr_t, Shape, int>> entries, bool wake,
                         int process_set) {
  Request request = Named(std::move(name), Collective::kAllgather, process_set);
  std::vector<Part> parts;
  for (auto& [input, shape, dtype] : entries)
    AddRows(&request, &parts, input, 0, std::move(shape), dtype);
  return Submit(engine, std::move(request), std::move(parts), wake);
}

int64_t GroupedReducescatter(Engine& engine, std::string name,
                             std::vector<std::tuple<uintptr_t, uintptr_t, Shape, int>> entries,
                             int op, double prescale, double postscale, bool wake,
                             int process_set) {
  Request request =
      Reducing(std::move(name), op, prescale, postscale, process_set, Collective::kReducescatter);
  std::vector<Part> parts;
  for (auto& [input, output, shape, dtype] : entries)
    AddRows(&request, &parts, input, output, std::move(shape), dtype);
  return Submit(engine, std::move(request), std::move(parts), wake);
}

int64_t Alltoall(Engine& engine, std::string name, uintptr_t input, Shape shape, int dtype,
                 std::vector<int64_t> splits, bool wake, int process_set) {
  Request request = Named(std::move(name), Collective::kAlltoall, process_set);
  request.splits = std::move(splits);
  std::vector<Part> parts;
  AddRows(&request, &parts, input, 0, std::move(shape), dtype);
  return Submit(engine, std::move(request), std::move(parts), wake);
}

// What an allgather or an alltoall that has ended well has made, for each of its tensors.
std::vector<Output> OutputsOf(Engine& engine, int64_t handle) {
  std::shared_ptr<Operation> operation;
  ThrowIfFailed(engine.Find(handle, &operation));
  if (!operation->done.load() || operation->outputs.empty())
    throw py::value_error("handle " + std::to_string(handle) +
                          " is no allgather or alltoall that has ended well");
  return operation->outputs;
}

Executor& ExecutorOf(Engine& engine) {
  if (!engine.connected()) throw py::value_error("this needs an engine that has connected");
  return engine.executor();
}

py::dict StatsDict(Engine& engine) {
  const Stats stats = engine.GetStats();
  py::dict collectives;
  for (const auto& [key, carried] : stats.collectives)
    collectives[key.c_str()] =
        py::dict(py::arg("calls") = carried.calls, py::arg("tensors") = carried.tensors,
                 py::arg("bytes") = carried.bytes);
  py::dict histograms, latencies;
  for (const auto& [key, carried] : stats.collectives)
    histograms[key.c_str()] = py::dict(py::arg("seconds") = static_cast<double>(carried.ns) * 1e-9,
                                       py::arg("by_microseconds") = carried.by_microseconds.counts,
                                       py::arg("by_bytes") = carried.by_bytes.counts);
  for (const auto& [key, latency] : stats.latencies)
    latencies[key.c_str()] = py::dict(py::arg("count") = latency.count,
                                      py::arg("seconds") = static_cast<double>(latency.ns) * 1e-9,
                                      py::arg("by_microseconds") = latency.by_microseconds.counts);
  return py::dict(py::arg("collectives") = collectives, py::arg("histograms") = histograms,
                  py::arg("latencies") = latencies, py::arg("in_flight") = stats.in_flight,
                  py::arg("cycles") = stats.cycles, py::arg("cache_hits") = stats.cache_hits,
                  py::arg("cache_misses") = stats.cache_misses, py::arg("sleeps") = stats.sleeps,
                  py::arg("idle_wakes") = stats.idle_wakes,
                  py::arg("kernels") = NameOf(BestKernels().isa),
                  py::arg("tunables") =
                      engine.connected() ? DictFrom(engine.executor().tunables()) : py::dict());
}

std::unique_ptr<Engine> MakeEngine(const py::dict& config) {
  std::unique_ptr<Engine> engine;
  ThrowIfFailed(Engine::Create(ConfigFrom(config), &engine));
  return engine;
}

// Destroying an engine joins its thread and may wait for the driver: not with the GIL held. The
// last to hold it may be a framework's thread that never had the GIL.
void Destroy(Engine* engine) {
  if (PyGILState_Check() == 0) {
    delete engine;
    return;
  }
  py::gil_scoped_release release;
  delete engine;
}
using EngineHolder = std::shared_ptr<Engine>;

}  // namespace

PYBIND11_MODULE(_native, m) {
  py::class_<Exchange>(m, "Exchange")
      .def(py::init<py::capsule, std::vector<py::type>, py::str>(), py::arg("table"),
           py::arg("types"), py::arg("negated"));

  py::class_<Memory, std::shared_ptr<Memory>>(m, "Memory", py::buffer_protocol())
      .def_property_readonly(
          "address", [](const Memory& self) { return reinterpret_cast<uintptr_t>(self.data()); })
      .def_property_readonly("nbytes", &Memory::bytes)
      .def_buffer([](Memory& self) {
        return py::buffer_info(self.data(), 1, py::format_descriptor<uint8_t>::format(),
                               static_cast<py::ssize_t>(self.bytes()));
      });

  py::class_<Engine, EngineHolder>(m, "Engine")
      .def(py::init([](const py::dict& config) {
             return EngineHolder(MakeEngine(config).release(), Destroy);
           }),
           py::arg("config"))
      .def("listen",
           [](Engine& self) {
             std::string endpoint;
             ThrowIfFailed(self.Listen(&endpoint));
             return py::bytes(endpoint);
           })
      .def(
          "connect",
          [](Engine& self, int rank, const std::vector<py::bytes>& endpoints,
             const py::bytes& secret) {
            const std::vector<std::string> copies(endpoints.begin(), endpoints.end());
            const std::string key = secret;
            ThrowIfFailed(
                WithoutGil([&] { return self.Connect(rank, copies, key, SignalPending); }));
          },
          py::arg("rank"), py::arg("endpoints"), py::arg("secret"))
      .def_property_readonly("running", &Engine::running)
      .def_property_readonly("rank", [](const Engine& self) { return self.topology().rank; })
      .def_property_readonly("size", [](const Engine& self) { return self.topology().size; })
      .def_property_readonly("local_rank",
                             [](const Engine& self) { return self.topology().local_rank; })
      .def_property_readonly("local_size",
                             [](const Engine& self) { return self.topology().local_size; })
      .def_property_readonly("cross_rank",
                             [](const Engine& self) { return self.topology().cross_rank; })
      .def_property_readonly("cross_size",
                             [](const Engine& self) { return self.topology().cross_size; })
      .def_property_readonly("is_homogeneous",
                             [](const Engine& self) { return self.topology().homogeneous; })
      .def_property_readonly("hosts", [](const Engine& self) { return self.topology().hosts; })
      .def(
          "allocate",
          [](Engine& self, size_t nbytes) {
            std::shared_ptr<Memory> memory;
            ThrowIfFailed(self.Allocate(nbytes, &memory));
            return memory;
          },
          py::arg("nbytes"))
      .def(
          "allreduce",
          [](Engine& self, std::string name, uintptr_t input, uintptr_t output, int64_t count,
             int dtype, int op, double prescale, double postscale, Shape shape, bool wake,
             int process_set) {
            Request request = Reducing(std::move(name), op, prescale, postscale, process_set);
            std::vector<Part> parts;
            Add(&request, &parts, input, output, count, dtype, std::move(shape));
            return Submit(self, std::move(request), std::move(parts), wake);
          },
          py::arg("name"), py::arg("input"), py::arg("output"), py::arg("count"), py::arg("dtype"),
          py::arg("op"), py::arg("prescale") = 1.0, py::arg("postscale") = 1.0,
          py::arg("shape") = Shape{}, py::arg("wake") = true, py::arg("process_set") = 0)
      .def("allreduce_tensor", &AllreduceTensor, py::arg("name"), py::arg("tensor"),
           py::arg("exchange"), py::arg("op"), py::arg("prescale") = 1.0,
           py::arg("postscale") = 1.0, py::arg("wake") = true, py::arg("process_set") = 0)
      .def("grouped_allreduce", &GroupedAllreduce, py::arg("name"), py::arg("entries"),
           py::arg("op"), py::arg("prescale") = 1.0, py::arg("postscale") = 1.0,
           py::arg("wake") = true, py::arg("process_set") = 0)
      .def(
          "allgather",
          [](Engine& self, std::string name, uintptr_t input, Shape shape, int dtype, bool wake,
             int process_set) {
            Request request = Named(std::move(name), Collective::kAllgather, process_set);
            std::vector<Part> parts;
            AddRows(&request, &parts, input, 0, std::move(shape), dtype);
            return Submit(self, std::move(request), std::move(parts), wake);
          },
          py::arg("name"), py::arg("input"), py::arg("shape"), py::arg("dtype"),
          py::arg("wake") = true, py::arg("process_set") = 0)
      .def("grouped_allgather", &GroupedAllgather, py::arg("name"), py::arg("entries"),
           py::arg("wake") = true, py::arg("process_set") = 0)
      .def("grouped_reducescatter", &GroupedReducescatter, py::arg("name"), py::arg("entries"),
           py::arg("op"), py::arg("prescale") = 1.0, py::arg("postscale") = 1.0,
           py::arg("wake") = true, py::arg("process_set") = 0)
      .def("alltoall", &Alltoall, py::arg("name"), py::arg("input"), py::arg("shape"),
           py::arg("dtype"), py::arg("splits") = Shape{}, py::arg("wake") = true,
           py::arg("process_set") = 0)
      .def(
          "broadcast",
          [](Engine& self, std::string name, uintptr_t input, uintptr_t output, int64_t count,
             int dtype, int root, Shape shape, bool wake, int process_set) {
            Request request = Named(std::move(name), Collective::kBroadcast, process_set);
            request.root = root;
            std::vector<Part> parts;
            Add(&request, &parts, input, output, count, dtype, std::move(shape));
            return Submit(self, std::move(request), std::move(parts), wake);
          },
          py::arg("name"), py::arg("input"), py::arg("output"), py::arg("count"), py::arg("dtype"),
          py::arg("root"), py::arg("shape") = Shape{}, py::arg("wake") = true,
          py::arg("process_set") = 0)
      .def(
          "barrier",
          [](Engine& self, std::string name, bool wake, int process_set) {
            return Submit(self, Named(std::move(name), Collective::kBarrier, process_set), {},
                          wake);
          },
          py::arg("name"), py::arg("wake") = true, py::arg("process_set") = 0)
      .def(
          "join",
          [](Engine& self, bool over_active, bool wake) {
            Request request = Named("sparkvod.join", Collective::kJoin);
            request.root = over_active ? kOverActive : kOverAll;
            return Submit(self, std::move(request), {}, wake);
          },
          py::arg("over_active") = false, py::arg("wake") = true)
      .def(
          "last_joined",
          [](Engine& self, int64_t handle) {
            std::shared_ptr<Operation> operation;
            ThrowIfFailed(self.Find(handle, &operation));
            return operation->last_joined;
          },
          py::arg("handle"))
      .def(
          "add_process_set",
          [](Engine& self, const std::vector<int>& ranks, bool wake) {
            Request request = Named("sparkvod.add_process_set", Collective::kAddSet);
            request.splits.assign(ranks.begin(), ranks.end());
            return Submit(self, std::move(request), {}, wake);
          },
          py::arg("ranks"), py::arg("wake") = true)
      .def(
          "added_process_set",
          [](Engine& self, int64_t handle) {
            std::shared_ptr<Operation> operation;
            ThrowIfFailed(self.Find(handle, &operation));
            return operation->set == nullptr ? 0 : operation->set->id;
          },
          py::arg("handle"))
      .def(
          "remove_process_set",
          [](Engine& self, int process_set, bool wake) {
            Request request = Named("sparkvod.remove_process_set", Collective::kRemoveSet);
            request.root = process_set;
            return Submit(self, std::move(request), {}, wake);
          },
          py::arg("process_set"), py::arg("wake") = true)
      .def(
          "tune",
          [](Engine& self, const py::dict& values, bool alone, bool wake) {
            const int root = alone ? self.topology().rank : kByAll;
            Request request = Named("sparkvod.tune" + (alone ? "." + std::to_string(root) : ""),
                                    Collective::kTune);
            request.root = root;
            request.splits = Pack(TunablesFrom(values, ExecutorOf(self).tunables()));
            return Submit(self, std::move(request), {}, wake);
          },
          py::arg("values"), py::arg("alone") = false, py::arg("wake") = true)
      .def("tunables", [](Engine& self) { return DictFrom(ExecutorOf(self).tunables()); })
      .def("tunable_limits",
           [](Engine& self) {
             py::dict limits;
             for (const Tunable& t : ExecutorOf(self).in_effect())
               limits[KnobOf(t)] = py::make_tuple(ToPython(t, t.least), ToPython(t, t.most));
             return limits;
           })
      .def(
          "start_meter",
          [](Engine& self, int64_t steps) {
            if (steps < 1) throw py::value_error("a sample needs at least one step");
            ExecutorOf(self).meter().Start(steps);
          },
          py::arg("steps"))
      .def("stop_meter", [](Engine& self) { ExecutorOf(self).meter().Start(0); })
      .def(
          "next_sample",
          [](Engine& self, double timeout) -> std::optional<std::tuple<uint64_t, double>> {
            Meter& meter = ExecutorOf(self).meter();
            Sample sample;
            if (!WithoutGil([&] { return meter.Next(timeout, &sample); })) return std::nullopt;
            return std::make_tuple(sample.bytes, static_cast<double>(sample.ns) * 1e-9);
          },
          py::arg("timeout"))
      .def(
          "poll",
          [](Engine& self, int64_t handle) {
            bool done = false;
            ThrowIfFailed(self.Poll(handle, &done));
            return done;
          },
          py::arg("handle"))
      .def(
          "wait",
          [](Engine& self, int64_t handle, double timeout) {
            const Result result =
                WithoutGil([&] { return self.Wait(handle, timeout, SignalPending); });
            if (!result.ok()) Throw(result);
          },
          py::arg("handle"), py::arg("timeout") = -1.0)
      .def("release", &Engine::Release, py::arg("handle"))
      .def(
          "gathered",
          [](Engine& self, int64_t handle) {
            const Output output = OutputsOf(self, handle)[0];
            return std::make_tuple(output.memory, output.rows);
          },
          py::arg("handle"))
      .def(
          "outputs",
          [](Engine& self, int64_t handle) {
            std::vector<std::tuple<std::shared_ptr<Memory>, std::vector<int64_t>>> outputs;
            for (const Output& output : OutputsOf(self, handle))
              outputs.emplace_back(output.memory, output.rows);
            return outputs;
          },
          py::arg("handle"))
      .def("stats", &StatsDict)
      .def("set_stack_signal", &Engine::SetStackSignal, py::arg("signal"))
      .def(
          "start_timeline",
          [](Engine& self, const std::string& path, bool mark_cycles) {
            ThrowIfFailed(WithoutGil([&] { return self.StartTimeline(path, mark_cycles); }));
          },
          py::arg("path"), py::arg("mark_cycles") = false)
      .def("stop_timeline",
           [](Engine& self) {
             WithoutGil([&] {
               self.StopTimeline();
               return true;
             });
           })
      .def_property_readonly("timeline_on", [](Engine& self) { return self.timeline().on(); })
      .def(
          "mark",
          [](Engine& self, std::string lane, std::string name, int64_t begin_ns, int64_t end_ns) {
            self.timeline().Add(
                {Lane::kThread, std::move(lane), std::move(name), begin_ns, end_ns, -1, {}});
          },
          py::arg("lane"), py::arg("name"), py::arg("begin_ns"), py::arg("end_ns"))
      .def(
          "abort",
          [](Engine& self, const std::string& reason) {
            WithoutGil([&] {
              self.Abort(reason);
              return true;
            });
          },
          py::arg("reason"))
      .def(
          "shutdown",
          [](Engine& self, const std::string& why) {
            ThrowIfFailed(WithoutGil([&] { return self.Shutdown(SignalPending, why); }));
          },
          py::arg("why") = "");

  m.def(
      "set_current",
      [](std::optional<EngineHolder> engine) { SetCurrent(engine.value_or(nullptr)); },
      py::arg("engine"));
  m.def("ops_table", [] { return reinterpret_cast<uintptr_t>(&OpsTable()); });
}

}  // namespace sparkvod
