// What the libraries of graph frameworks' ops call the engine by: a table of C functions over plain
// structs, whose address Python hands from the extension to them. They link nothing of the engine
// and are built with no header of it but this one.
#pragma once

#include <cstdint>

namespace sparkvod {

// Changes with every change below; a library built against another one refuses to work.
constexpr int32_t kTableVersion = 1;

// The same codes as Collective.
enum TableCollective : int32_t {
  kTableAllreduce = 0,
  kTableAllgather = 1,
  kTableBroadcast = 2,
  kTableBarrier = 3,
  kTableReducescatter = 4,
  kTableAlltoall = 5,
};

enum TableWorld : int32_t {
  kTableRank = 0,
  kTableSize,
  kTableLocalRank,
  kTableLocalSize,
  kTableCrossRank,
  kTableCrossSize,
};

// One tensor; its memory stays as it is until the call is done.
struct TableTensor {
  const void* in;
  void* out;  // null for what ends with outputs
  int32_t dtype;
  int32_t dims;
  const int64_t* shape;
};

// What an allgather, for each tensor, or an alltoall has made.
struct TableOutput {
  void* data;
  int64_t bytes;
  int32_t ranks;
  const int64_t* rows;  // of each rank
  void* owner;          // taken over by setting it to null; then to be released
};

struct TableOutcome {
  const char* error;  // name of the class in sparkvod.errors, or "ValueError"; null: it went well
  const char* message;
  int32_t outputs;
  TableOutput* output;
};

struct TableCall {
  const char* name;
  int32_t collective;
  int32_t op;
  int32_t root;         // a rank of the world
  int32_t process_set;  // 0: all ranks
  int32_t tensors;
  const TableTensor* tensor;
  double prescale;
  double postscale;
  int32_t splits;  // of an alltoall; 0: equal ones
  const int64_t* split;
  // Called exactly once, perhaps before `submit` has returned, on a thread that must not be made to
  // wait. What the outcome points to ends with the call.
  void (*done)(void* context, TableOutcome* outcome);
  void* context;
};

struct Table {
  int32_t version;
  // To the engine of this process's current world. The call's structs may go when it has returned.
  void (*submit)(const TableCall* call);
  void (*release)(void* owner);
  // A number of the current world, -1 when there is none.
  int32_t (*world)(int32_t what);
};

}  // namespace sparkvod
