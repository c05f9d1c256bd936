"""The collectives that move rows between ranks: alltoall, reducescatter, and allgather and reducescatter of groups.

What :mod:`sparkvod.torch.ops` says of names, handles and errors holds for these as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparkvod.core import collectives, handles
from sparkvod.core.compression import check_compressor
from sparkvod.core.handles import Pending
from sparkvod.core.names import new_name, now
from sparkvod.core.ops import check_rows, reducescatter_op, set_id
from sparkvod.core.process_sets import ProcessSet, global_process_set
from sparkvod.torch import adapter, autograd
from sparkvod.torch.compression import Compression

__all__ = [
    "alltoall",
    "alltoall_async",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]

Splits = Sequence[int] | torch.Tensor | None


def _splits(splits: Splits) -> list[int] | None:
    if splits is None:
        return None
    if isinstance(splits, torch.Tensor):
        if splits.dtype not in (torch.int32, torch.int64) or splits.dim() != 1:
            raise ValueError(
                f"splits of {splits.dtype} with {splits.dim()} dimensions were found, int32 or int64 with one "
                "dimension was expected"
            )
        return [int(split) for split in splits.tolist()]
    if not all(isinstance(split, int) for split in splits):
        raise ValueError(f"splits={splits!r} was found, a list of integers was expected")
    return list(splits)


def _then(pending: Pending, change: Any) -> Pending:
    finish = pending.finish
    assert finish is not None
    pending.finish = lambda ended: change(finish(ended))
    return pending


def _check_rows(tensor: Any, what: str) -> None:
    if isinstance(tensor, torch.Tensor):
        check_rows(tensor.dim(), what, "use view(1)")


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts :func:`alltoall`; returns a handle."""
    members = set_id(process_set)
    _check_rows(tensor, "alltoall")
    name = name or new_name("alltoall", members)
    pending = collectives.alltoall(adapter, tensor, name, _splits(splits), process_set=members)
    if splits is None:
        return handles.add(_then(pending, lambda result: result[0]))
    return handles.add(_then(pending, lambda result: (result[0], torch.tensor(result[1], dtype=torch.int32))))


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends some rows to each rank and returns what came from each. Differentiable.

    Args:
        tensor: of any dtype that the engine knows; the dimensions behind the first are the same on all ranks.
        splits: how many rows go to each rank, a list or a 1-D int32 tensor; together at most the tensor's. None: the
            tensor's rows, which must divide evenly, in equal parts.
        name: name of the operation, the same on all ranks.
        process_set: among which ranks; by default among all.

    Returns:
        The received rows in the order of the ranks; with ``splits`` the pair of these and an int32 tensor that says
        how many came from each rank.
    """
    members = set_id(process_set)
    _check_rows(tensor, "alltoall")
    rows = _splits(splits)

    def run(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(tensor, torch.Tensor) and autograd.wanted(tensor):
            return autograd.Alltoall.apply(tensor, name, rows, members)
        received, counts = collectives.alltoall(adapter, tensor, name, rows, wake=False, process_set=members).wait()
        return received, torch.tensor(counts, dtype=torch.int32)

    result = now("alltoall", name, run, members)
    return result[0] if splits is None else result


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts :func:`reducescatter`, uncompressed; returns a handle."""
    members = set_id(process_set)
    _check_rows(tensor, "reducescatter")
    name = name or new_name("reducescatter", members)
    pending = collectives.reducescatter(
        adapter, [tensor], name, reducescatter_op(op), prescale_factor, postscale_factor, process_set=members
    )
    return handles.add(_then(pending, lambda results: results[0]))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Returns this rank's rows of what the ranks' tensors are reduced to. Differentiable for sums and averages.

    Args:
        tensor: of the same shape and dtype on all ranks, with at least one dimension. Of ``n`` rows each rank gets
            ``n // size()``, and the first ``n % size()`` ranks one more.
        name: name of the operation, the same on all ranks.
        compression: what the tensor is sent as.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        process_set: among which ranks; by default among all.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.
    """
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts :func:`grouped_reducescatter`, uncompressed; returns one handle, whose result is the list."""
    members = set_id(process_set)
    for tensor in tensors:
        _check_rows(tensor, "reducescatter")
    name = name or new_name("grouped_reducescatter", members)
    return handles.add(
        collectives.reducescatter(
            adapter, list(tensors), name, reducescatter_op(op), prescale_factor, postscale_factor, process_set=members
        )
    )


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """As :func:`reducescatter`, for a list of tensors that are reduced as one unit."""
    op = reducescatter_op(op)
    members = set_id(process_set)
    for tensor in tensors:
        _check_rows(tensor, "reducescatter")
    check_compressor(compression)
    pairs = [compression.compress(tensor) for tensor in tensors]
    compressed = [tensor for tensor, _ in pairs]

    def run(name: str) -> Sequence[torch.Tensor]:
        if any(isinstance(tensor, torch.Tensor) and autograd.wanted(tensor) for tensor in compressed):
            return autograd.Reducescatter.apply(name, op, prescale_factor, postscale_factor, members, *compressed)
        return collectives.reducescatter(
            adapter, compressed, name, op, prescale_factor, postscale_factor, wake=False, process_set=members
        ).wait()

    reduced = now("reducescatter", name, run, members)
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts :func:`grouped_allgather`; returns one handle, whose result is the list."""
    members = set_id(process_set)
    name = name or new_name("grouped_allgather", members)
    pending = collectives.grouped_allgather(adapter, list(tensors), name, process_set=members)
    return handles.add(_then(pending, lambda results: [gathered for gathered, _ in results]))


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """As ``allgather``, for a list of tensors that are gathered as one unit. Differentiable."""
    members = set_id(process_set)
    tensors = list(tensors)

    def run(name: str) -> list[torch.Tensor]:
        if any(isinstance(tensor, torch.Tensor) and autograd.wanted(tensor) for tensor in tensors):
            return list(autograd.GroupedAllgather.apply(name, members, *tensors))
        gathered = collectives.grouped_allgather(adapter, tensors, name, wake=False, process_set=members).wait()
        return [result for result, _ in gathered]

    return now("grouped_allgather", name, run, members)
