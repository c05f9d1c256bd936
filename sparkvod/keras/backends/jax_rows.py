"""Collectives on JAX's arrays that move rows: allgather, reducescatter, alltoall.

How many rows an allgather or an alltoall ends with, the ranks tell each other while they run, but compiled code has
shapes from when it is traced. There, all ranks must be alike: the same number of rows in each one's allgather, the same
splits in each one's alltoall. Nothing is agreed on while JAX traces, because a rank may trace again alone, for a shape
that only it has, and would wait for ranks that do not. Instead each call compares what came with what was traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from sparkvod.core import basics, collectives, ops
from sparkvod.core.process_sets import ProcessSet, global_process_set
from sparkvod.errors import MismatchError
from sparkvod.keras.backends import arrays
from sparkvod.keras.backends.jax_calls import (
    Run,
    check_differentiable,
    exchanged,
    floating,
    grad_name,
    tensor_of,
    traced,
    with_gradient,
)
from sparkvod.keras.backends.jax_compression import Compression
from sparkvod.keras.backends.jax_reduce import compressed, reduced


def _check_alike(what: str, expected: Sequence[int], found: Sequence[int]) -> None:
    if list(expected) != list(found):
        raise MismatchError(
            f"the ranks gave {what} in code that JAX compiles {list(found)} rows, {list(expected)} were expected: such "
            "code has its shapes before the ranks meet, so all are taken to be like this one; pad to the same rows, "
            "and the same splits, on all ranks, or call it outside jax.jit"
        )


def _gathered(
    tensors: Sequence[Any], name: str | None, members: int, shapes: Any = None
) -> tuple[list[Any], list[list[int]]]:
    # ``shapes``, where they are known of the results; else those of as many rows on all ranks, in compiled code.
    number = len(basics.world().ranks_of(members))
    alike = [[tensor.shape[0] if tensor.ndim else 1] * number for tensor in tensors]
    compiled = traced(tensors)
    by_rank: list[list[int]] = list(alike) if compiled else []

    def run(named: str, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        found = collectives.grouped_allgather(arrays, values, named, wake=False, process_set=members).wait()
        if not compiled:
            by_rank[:] = [rows for _, rows in found]
        elif shapes is None:
            for (_, rows), expected in zip(found, alike, strict=True):
                _check_alike("an allgather", expected, rows)
        return [result for result, _ in found]

    known = [(sum(rows), *tensor.shape[1:]) for rows, tensor in zip(alike, tensors, strict=True)]
    return exchanged("jax.allgather", name, members, run, tensors, known if shapes is None else shapes), by_rank


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns the ranks' tensors, one behind the other, as one unit; in compiled code as many rows of each rank.

    Raises:
        MismatchError: in code that JAX compiles, the ranks have not all as many rows.
    """
    members, sent = ops.set_id(process_set), [tensor_of(tensor) for tensor in tensors]
    rows: list[list[int]] = []

    def forward(*values: Any) -> list[Any]:
        results, rows[:] = _gathered(values, name, members)
        return results

    def back(grads: Sequence[Any]) -> list[Any]:
        place = basics.world().ranks_of(members).index(basics.rank())
        averaged = reduced(grads, grad_name(name), ops.Average, 1.0, 1.0, members)
        floats = floating(sent)
        begins = [(sum(rows[k][:place]), rows[k][place]) for k in floats]
        return [
            grad[begin : begin + count].reshape(sent[k].shape)
            for grad, k, (begin, count) in zip(averaged, floats, begins, strict=True)
        ]

    return with_gradient(forward, back, sent)


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """As :func:`grouped_allgather`, of one tensor."""
    return grouped_allgather([value], name, process_set)[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int | None = ops.Average,
    compression: Any = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Returns this rank's rows of the reduced tensors, as one unit."""
    code, members = ops.reducescatter_op(op), ops.set_id(process_set)
    ranks = basics.world().ranks_of(members)
    place = ranks.index(basics.rank()) if basics.rank() in ranks else len(ranks)

    def run(named: str, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        scales = prescale_factor, postscale_factor
        return collectives.reducescatter(arrays, values, named, code, *scales, wake=False, process_set=members).wait()

    def scattered(sent: list[Any]) -> list[Any]:
        for tensor in sent:
            ops.check_rows(tensor.ndim, "reducescatter", "reshape it")
        shapes = [(_share(t.shape[0], place, len(ranks)), *t.shape[1:]) for t in sent]

        def back(grads: Sequence[Any]) -> list[Any]:
            check_differentiable(code)
            scale = prescale_factor * postscale_factor * (len(ranks) if code == ops.Sum else 1)
            whole = [sent[k].shape for k in floating(sent)]
            return [grad * scale for grad in _gathered(grads, grad_name(name), members, whole)[0]]

        return with_gradient(
            lambda *values: exchanged("jax.reducescatter", name, members, run, values, shapes), back, sent
        )

    return compressed(tensors, compression, scattered)


def reducescatter(value: Any, **arguments: Any) -> Any:
    """Returns this rank's rows of the reduced value."""
    return grouped_reducescatter([value], **arguments)[0]


def _share(rows: int, place: int, size: int) -> int:
    return rows // size + (place < rows % size)


def alltoall(
    value: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the rows that came from all ranks; with ``splits`` the pair of them and how many came from each rank.

    Raises:
        ValueError: the splits are no integers, or have no values because JAX traces them.
        MismatchError: in code that JAX compiles, another rank's splits are not this one's.
    """
    members, sent = ops.set_id(process_set), tensor_of(value)
    ops.check_rows(sent.ndim, "alltoall", "reshape it")
    counts = None if splits is None else _splits(splits)
    ranks = basics.world().ranks_of(members)
    received: list[int] = []

    def forward(x: Any) -> list[Any]:
        if not traced([x]):
            return exchanged("jax.alltoall", name, members, _exchange(counts, members, received), [x])
        if counts is not None and (len(counts) != len(ranks) or min(counts) < 0):
            raise ValueError(f"splits={counts} was found, a number of rows for each of {len(ranks)} ranks was expected")
        parts = [x.shape[0] // len(ranks)] * len(ranks) if counts is None else counts
        # Of a rank outside the set the engine says so.
        received[:] = [parts[ranks.index(basics.rank()) if basics.rank() in ranks else 0]] * len(ranks)
        run = _exchange(counts, members, [], list(received))
        return exchanged("jax.alltoall", name, members, run, [x], [(sum(received), *x.shape[1:])])

    def back(grads: Sequence[Any]) -> list[Any]:
        there = None if counts is None else list(received)
        home = None if counts is None else [(sum(counts), *sent.shape[1:])]
        (grad,) = exchanged("jax.alltoall", grad_name(name), members, _exchange(there, members, []), grads, home)
        missing = sent.shape[0] - grad.shape[0]
        return [jnp.concatenate([grad, jnp.zeros((missing, *grad.shape[1:]), grad.dtype)]) if missing else grad]

    (result,) = with_gradient(forward, back, [sent])
    return result if splits is None else (result, jnp.asarray(received, "int32"))


def _exchange(splits: list[int] | None, members: int, received: list[int], expected: list[int] | None = None) -> Run:
    def run(named: str, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        result, received[:] = collectives.alltoall(
            arrays, values[0], named, splits, wake=False, process_set=members
        ).wait()
        if expected is not None:
            _check_alike("an alltoall", expected, received)
        return [result]

    return run


def _splits(splits: Any) -> list[int]:
    if isinstance(splits, jax.core.Tracer) or (
        isinstance(splits, (list, tuple)) and any(isinstance(split, jax.core.Tracer) for split in splits)
    ):
        raise ValueError(
            "splits that JAX traces were found in code that it compiles, numbers were expected there, since they "
            "decide the result's shape; pass a list of integers, or call it outside jax.jit"
        )
    found = np.asarray(splits)
    if found.dtype.kind not in "iu" or found.ndim != 1:
        raise ValueError(
            f"splits of {found.dtype} with {found.ndim} dimensions were found, integers in one dimension, one for each "
            "rank, were expected"
        )
    return [int(split) for split in found]
