"""The collectives on PyTorch tensors.

Each takes ``name``, which must be the same on all ranks (by default ranks that call in the same order agree), and
``process_set``, the ranks that
take part, by default all. ``*_async`` forms return a handle for :func:`poll` and :func:`synchronize`; a name may
not be used twice at a time. The forms that return a new tensor at once are differentiable.

Errors of all of them: ``NotInitializedError`` before ``init``; ``ValueError`` for an argument or dtype that cannot be
used or a name in flight; ``HorovodInternalError`` when the collective failed, because ranks disagree
(``MismatchError``), one was lost (``PeerLostError``) or late (``CollectiveTimeoutError``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparkvod.core import basics, collectives, handles
from sparkvod.core.compression import check_compressor
from sparkvod.core.handles import poll, synchronize
from sparkvod.core.names import in_set, new_name, now
from sparkvod.core.ops import allreduce_op, set_id
from sparkvod.core.process_sets import ProcessSet, global_process_set
from sparkvod.torch import adapter, autograd
from sparkvod.torch.compression import Compression

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "join",
    "poll",
    "synchronize",
]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts :func:`allreduce`, uncompressed; returns a handle. The tensor must not be changed until it is done."""
    op = allreduce_op(op, average)
    members = set_id(process_set)
    name = name or new_name("allreduce", members)
    return handles.add(
        collectives.allreduce(
            adapter, tensor, name, op, prescale_factor, postscale_factor, in_place=False, process_set=members
        )
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts :func:`allreduce_`; returns a handle. The tensor must not be touched until it is done."""
    op = allreduce_op(op, average)
    members = set_id(process_set)
    name = name or new_name("allreduce", members)
    return handles.add(
        collectives.allreduce(
            adapter, tensor, name, op, prescale_factor, postscale_factor, in_place=True, process_set=members
        )
    )


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Returns what the ranks' tensors are reduced to, element by element. Differentiable for sums and averages.

    Args:
        tensor: of the same shape and dtype, any that the engine knows, on all ranks.
        average: deprecated; True for Average, False for Sum.
        name: name of the operation, the same on all ranks.
        compression: what the tensor is sent as.
        op: ``Average`` (the default; truncating for integers, not for bool), ``Sum``, ``Min``, ``Max``, ``Product`` or
            ``Adasum``, of floating types, which combines what points in different directions.
            Of bool ``Sum`` and ``Max`` are the logical or, ``Min`` and ``Product`` the logical and. Sums and products
            of integers wrap. A NaN anywhere makes the result one.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.
        process_set: among which ranks; by default among all.

    Returns:
        A new tensor of the shape, dtype and device of ``tensor``.
    """
    op = allreduce_op(op, average)
    members = set_id(process_set)
    if compression is not Compression.none:
        check_compressor(compression)
    compressed, context = compression.compress(tensor)

    def run(name: str) -> torch.Tensor:
        if isinstance(compressed, torch.Tensor) and autograd.wanted(compressed):
            return autograd.Allreduce.apply(compressed, name, op, prescale_factor, postscale_factor, members)
        return collectives.allreduce(
            adapter,
            compressed,
            name,
            op,
            prescale_factor,
            postscale_factor,
            in_place=False,
            wake=False,
            process_set=members,
        ).wait()

    return compression.decompress(now("allreduce", name, run, members), context)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As :func:`allreduce`, in place and not differentiable; returns the tensor."""
    op = allreduce_op(op, average)
    members = 0 if process_set is global_process_set else set_id(process_set)
    world = basics.world()
    kind = in_set("allreduce", members)
    borrowed = name or world.borrow_name(kind)
    try:
        return collectives.allreduce_now(adapter, tensor, borrowed, op, prescale_factor, postscale_factor, members)
    finally:
        if not name:
            world.return_name(kind, borrowed)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts :func:`grouped_allreduce` without compression; returns one handle, whose result is the list."""
    op = allreduce_op(op, average)
    members = set_id(process_set)
    name = name or new_name("grouped_allreduce", members)
    return handles.add(
        collectives.grouped_allreduce(
            adapter, list(tensors), name, op, prescale_factor, postscale_factor, in_place=False, process_set=members
        )
    )


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts :func:`grouped_allreduce_`; returns one handle, whose result is the list."""
    op = allreduce_op(op, average)
    members = set_id(process_set)
    name = name or new_name("grouped_allreduce", members)
    return handles.add(
        collectives.grouped_allreduce(
            adapter, list(tensors), name, op, prescale_factor, postscale_factor, in_place=True, process_set=members
        )
    )


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As :func:`allreduce`, for a list of tensors that are reduced as one unit. Differentiable."""
    op = allreduce_op(op, average)
    members = set_id(process_set)
    check_compressor(compression)
    pairs = [compression.compress(tensor) for tensor in tensors]
    compressed = [tensor for tensor, _ in pairs]

    def run(name: str) -> Sequence[torch.Tensor]:
        if any(isinstance(tensor, torch.Tensor) and autograd.wanted(tensor) for tensor in compressed):
            return autograd.GroupedAllreduce.apply(name, op, prescale_factor, postscale_factor, members, *compressed)
        return collectives.grouped_allreduce(
            adapter,
            compressed,
            name,
            op,
            prescale_factor,
            postscale_factor,
            in_place=False,
            wake=False,
            process_set=members,
        ).wait()

    reduced = now("grouped_allreduce", name, run, members)
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As :func:`grouped_allreduce`, in place and not differentiable; returns the list."""
    op = allreduce_op(op, average)
    members = set_id(process_set)
    tensors = list(tensors)

    def run(name: str) -> list[torch.Tensor]:
        return collectives.grouped_allreduce(
            adapter,
            tensors,
            name,
            op,
            prescale_factor,
            postscale_factor,
            in_place=True,
            wake=False,
            process_set=members,
        ).wait()

    return now("grouped_allreduce", name, run, members)


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts :func:`allgather`; returns a handle."""
    members = set_id(process_set)
    name = name or new_name("allgather", members)
    pending = collectives.allgather(adapter, tensor, name, process_set=members)
    gather = pending.finish
    assert gather is not None
    pending.finish = lambda ended: gather(ended)[0]
    return handles.add(pending)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Returns the ranks' tensors, one behind the other along dimension 0. Differentiable.

    Args:
        tensor: of any dtype that the engine knows; dimension 0 may differ between ranks, the others may not. A scalar
            counts as one element.
        name: name of the operation, the same on all ranks.
        process_set: among which ranks; by default among all.
    """
    members = set_id(process_set)

    def run(name: str) -> torch.Tensor:
        if isinstance(tensor, torch.Tensor) and autograd.wanted(tensor):
            return autograd.Allgather.apply(tensor, name, members)
        return collectives.allgather(adapter, tensor, name, wake=False, process_set=members).wait()[0]

    return now("allgather", name, run, members)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts :func:`broadcast`; returns a handle."""
    members = set_id(process_set)
    name = name or new_name("broadcast", members)
    return handles.add(collectives.broadcast(adapter, tensor, name, root_rank, in_place=False, process_set=members))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts :func:`broadcast_`; returns a handle."""
    members = set_id(process_set)
    name = name or new_name("broadcast", members)
    return handles.add(collectives.broadcast(adapter, tensor, name, root_rank, in_place=True, process_set=members))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Returns a copy of the root's tensor. Differentiable.

    Args:
        tensor: of any dtype that the engine knows, of the same shape and dtype on all ranks.
        root_rank: whose tensor it is.
        name: name of the operation, the same on all ranks.
        process_set: among which ranks; by default among all.
    """
    members = set_id(process_set)

    def run(name: str) -> torch.Tensor:
        if isinstance(tensor, torch.Tensor) and autograd.wanted(tensor):
            return autograd.Broadcast.apply(tensor, root_rank, name, members)
        return collectives.broadcast(
            adapter, tensor, name, root_rank, in_place=False, wake=False, process_set=members
        ).wait()

    return now("broadcast", name, run, members)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """As :func:`broadcast`, in place and not differentiable; returns the tensor."""
    members = set_id(process_set)

    def run(name: str) -> torch.Tensor:
        return collectives.broadcast(
            adapter, tensor, name, root_rank, in_place=True, wake=False, process_set=members
        ).wait()

    return now("broadcast", name, run, members)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when all ranks of the set have called it."""
    members = set_id(process_set)
    now("barrier", None, lambda name: collectives.barrier(name, members), members)


def join(device: int = -1, average_over: str = "all") -> int:
    """Says that this rank has no more to do, and returns when all ranks have said so.

    Meanwhile it takes part in what the others go on with: it contributes the neutral element to reductions and no rows
    to ``allgather`` and ``alltoall``; its share of a ``reducescatter`` is dropped. A broadcast from it and rows sent to
    it are errors of those that asked for them.

    Args:
        device: for compatibility; has no meaning.
        average_over: what averages are divided by meanwhile: "all", the number of ranks, or "active", the number of
            those that have not joined. The same on all ranks.

    Returns:
        The rank that joined last.
    """
    return collectives.join(average_over)
