"""Collectives on the tensors of Keras's backend; differentiable as the backend's own front end is.

All take ``name``, the same on all ranks, which messages show and which may be left out, and ``process_set``, among
whose ranks they run, by default all. They raise ``ValueError`` for what the caller did wrong, and
``HorovodInternalError`` when the collective failed; in compiled code the backend's errors around these
(see ``sparkvod.keras.own_errors``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparkvod.core import collectives
from sparkvod.core.ops import Average
from sparkvod.core.process_sets import ProcessSet, global_process_set
from sparkvod.keras import backends

_backend = backends.current()
_ops: Any = _backend.collectives
Compression: Any = _backend.Compression


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the value reduced over the ranks.

    Args:
        value: a tensor or variable of the same shape and dtype on all ranks.
        name: name of the operation.
        average: deprecated: True for ``op=Average``, False for ``op=Sum``.
        prescale_factor: multiplies the value before the reduction.
        postscale_factor: multiplies the result.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        compression: what the value is sent as.
        process_set: among which ranks.
    """
    return _ops.allreduce(
        value,
        name=name,
        average=average,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        op=op,
        compression=compression,
        process_set=process_set,
    )


def grouped_allreduce(
    values: Sequence[Any],
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """As :func:`allreduce`, for a list of values that are reduced as one unit."""
    return _ops.grouped_allreduce(
        values,
        name=name,
        average=average,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        op=op,
        compression=compression,
        process_set=process_set,
    )


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Returns the ranks' values, one behind the other along the first dimension, in which alone they may differ."""
    return _ops.allgather(value, name=name, process_set=process_set)


def grouped_allgather(
    values: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """As :func:`allgather`, for a list of values that are gathered as one unit."""
    return _ops.grouped_allgather(values, name=name, process_set=process_set)


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Returns the root's value, whose shape and dtype are the same on all ranks."""
    return _ops.broadcast(value, root_rank, name=name, process_set=process_set)


def reducescatter(
    value: Any,
    name: str | None = None,
    op: int | None = Average,
    compression: Any = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns this rank's rows of the reduced value: of ``n`` rows ``n // size()``, the first ranks one more."""
    return _ops.reducescatter(
        value,
        name=name,
        op=op,
        compression=compression,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def grouped_reducescatter(
    values: Sequence[Any],
    name: str | None = None,
    op: int | None = Average,
    compression: Any = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """As :func:`reducescatter`, for a list of values that are reduced as one unit."""
    return _ops.grouped_reducescatter(
        values,
        name=name,
        op=op,
        compression=compression,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def alltoall(
    value: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends some rows to each rank and returns what came from each.

    Args:
        value: a tensor whose dimensions behind the first are the same on all ranks.
        splits: how many rows go to each rank; None: equal parts of all.
        name: name of the operation.
        process_set: among which ranks.

    Returns:
        The received rows; with ``splits`` the pair of these and a tensor of how many came from each rank.
    """
    return _ops.alltoall(value, splits, name=name, process_set=process_set)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when all ranks have called it."""
    _ops.barrier(process_set=process_set)


def join(device: int = -1, average_over: str = "all") -> int:
    """Says that this rank has no more to do, and returns the rank that joined last when all have; outside functions.

    Args:
        device: for compatibility; has no meaning.
        average_over: what averages are divided by meanwhile: "all", or "active", those that have not joined.
    """
    return collectives.join(average_over)
