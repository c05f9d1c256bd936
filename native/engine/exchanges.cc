// Allgathers and reducescatters: one tensor as it is, several small ones as one.
#include <algorithm>
#include <cstring>

#include "native/engine/executor.h"

namespace sparkvod {
namespace {

void Copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace

Result Executor::MakeOutput(std::vector<int64_t> rows, size_t row_bytes, Output* output,
                            std::vector<size_t>* offsets) {
  offsets->assign(1, 0);
  for (const int64_t r : rows)
    offsets->push_back(offsets->back() + static_cast<size_t>(r) * row_bytes);
  std::unique_ptr<Memory> memory;
  SPARKVOD_TRY(Allocate(offsets->back(), &memory));
  *output = {std::move(memory), std::move(rows)};
  return {};
}

Result Executor::Allocate(size_t bytes, std::unique_ptr<Memory>* out) {
  char* data = nullptr;
  const std::shared_ptr<Heap>& heap = world_->arena->heap();
  SPARKVOD_TRY(heap->Allocate(bytes, &data, false));
  *out = std::make_unique<Memory>(heap, data, bytes);
  return {};
}

Result Executor::Allgather(const Target& target, const Batch& batch,
                           const std::vector<Agreed>& agreed, Carrier* carrier) {
  const auto size = static_cast<size_t>(target.comm->size());
  const auto rank = static_cast<size_t>(target.comm->rank());
  std::vector<std::vector<size_t>> offsets(batch.pieces.size());  // of each piece's output
  std::vector<char*> outs;
  for (size_t p = 0; p < batch.pieces.size(); ++p) {
    const size_t e = batch.pieces[p].entry;
    const Agreed& one = agreed[batch.pieces[p].agreed];
    Operation& operation = *one.operation;
    operation.outputs.resize(operation.request.entries.size());
    std::vector<int64_t> rows;
    for (const Request& r : *one.by_rank) rows.push_back(r.entries[e].shape[0]);
    SPARKVOD_TRY(MakeOutput(std::move(rows), operation.request.entries[e].row_bytes(),
                            &operation.outputs[e], &offsets[p]));
    outs.push_back(operation.outputs[e].memory->data());
  }
  const auto own = [&](size_t p) {
    return agreed[batch.pieces[p].agreed].operation->parts[batch.pieces[p].entry].in;
  };
  if (batch.bytes == 0) return {};
  if (batch.pieces.size() == 1)
    return target.backend->Allgather(own(0), outs[0], offsets[0], carrier);

  // All of a rank's pieces are one block.
  std::vector<size_t> blocks(1, 0);
  for (size_t r = 0; r < size; ++r) {
    blocks.push_back(blocks.back());
    for (const std::vector<size_t>& of : offsets) blocks.back() += of[r + 1] - of[r];
  }
  std::unique_ptr<Memory> mine, all;
  SPARKVOD_TRY(Allocate(blocks[rank + 1] - blocks[rank], &mine));
  SPARKVOD_TRY(Allocate(blocks.back(), &all));
  char* to = mine->data();
  for (size_t p = 0; p < offsets.size(); ++p) {
    const size_t bytes = offsets[p][rank + 1] - offsets[p][rank];
    Copy(to, own(p), bytes);
    to += bytes;
  }
  SPARKVOD_TRY(target.backend->Allgather(mine->data(), all->data(), blocks, carrier));
  const char* from = all->data();
  for (size_t r = 0; r < size; ++r)
    for (size_t p = 0; p < offsets.size(); ++p) {
      const size_t bytes = offsets[p][r + 1] - offsets[p][r];
      Copy(outs[p] + offsets[p][r], from, bytes);
      from += bytes;
    }
  return {};
}

Result Executor::Reducescatter(const Target& target, const Batch& batch,
                               const std::vector<Agreed>& agreed, Carrier* carrier) {
  const int size = target.comm->size(), rank = target.comm->rank();
  ReducescatterCall call{batch.call.dtype,
                         batch.call.op,
                         batch.call.prescale,
                         batch.call.postscale,
                         batch.call.average_over,
                         {},
                         {},
                         batch.call.placement};
  // In elements: where each rank's share of each piece begins.
  std::vector<std::vector<size_t>> begins(batch.pieces.size());
  std::vector<const Part*> parts;
  for (size_t p = 0; p < batch.pieces.size(); ++p) {
    const size_t e = batch.pieces[p].entry;
    const Operation& operation = *agreed[batch.pieces[p].agreed].operation;
    const Entry& entry = operation.request.entries[e];
    const size_t row = entry.row_bytes() / SizeOf(entry.dtype);
    for (int r = 0; r <= size; ++r)
      begins[p].push_back(row * static_cast<size_t>(FirstRow(entry.shape[0], r, size)));
    parts.push_back(&operation.parts[e]);
  }
  if (parts.size() == 1) {
    call.part = *parts[0];
    call.begins = begins[0];
    return target.backend->Reducescatter(call, carrier);
  }

  // All pieces' shares of a rank are one share.
  call.begins.assign(1, 0);
  for (int r = 0; r < size; ++r) {
    call.begins.push_back(call.begins.back());
    for (const std::vector<size_t>& of : begins)
      call.begins.back() += of[static_cast<size_t>(r) + 1] - of[static_cast<size_t>(r)];
  }
  const size_t item = SizeOf(call.dtype);
  const auto me = static_cast<size_t>(rank);
  std::unique_ptr<Memory> in, out;
  SPARKVOD_TRY(Allocate(call.begins.back() * item, &in));
  SPARKVOD_TRY(Allocate((call.begins[me + 1] - call.begins[me]) * item, &out));
  char* to = in->data();
  for (size_t r = 0; r < static_cast<size_t>(size); ++r)
    for (size_t p = 0; p < parts.size(); ++p) {
      const size_t bytes = (begins[p][r + 1] - begins[p][r]) * item;
      Copy(to, static_cast<const char*>(parts[p]->in) + begins[p][r] * item, bytes);
      to += bytes;
    }
  const bool neutral = std::all_of(parts.begin(), parts.end(), [](auto* p) { return p->neutral; });
  call.part = {in->data(), out->data(), call.begins.back(), neutral};
  SPARKVOD_TRY(target.backend->Reducescatter(call, carrier));
  const char* from = out->data();
  for (size_t p = 0; p < parts.size(); ++p) {
    const size_t bytes = (begins[p][me + 1] - begins[p][me]) * item;
    Copy(parts[p]->out, from, bytes);
    from += bytes;
  }
  return {};
}

}  // namespace sparkvod
