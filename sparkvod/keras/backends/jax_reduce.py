"""Collectives on JAX's arrays whose results have the arrays' shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import numpy as jnp

from sparkvod.core import basics, collectives, ops
from sparkvod.core.compression import check_compressor
from sparkvod.core.names import now
from sparkvod.core.process_sets import ProcessSet, global_process_set
from sparkvod.keras.backends import arrays
from sparkvod.keras.backends.jax_calls import check_differentiable, exchanged, grad_name, tensor_of, with_gradient


def reduced(
    tensors: Sequence[Any], name: str | None, op: int, prescale: float, postscale: float, members: int
) -> list[Any]:
    """Returns the tensors reduced over the ranks of a process set, as one unit."""

    def run(named: str, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return collectives.grouped_allreduce(
            arrays, values, named, op, prescale, postscale, in_place=False, wake=False, process_set=members
        ).wait()

    def back(grads: Sequence[Any]) -> list[Any]:
        check_differentiable(op)
        return reduced(grads, grad_name(name), op, prescale, postscale, members)

    return with_gradient(lambda *values: exchanged("jax.allreduce", name, members, run, values), back, tensors)


def compressed(tensors: Sequence[Any], compression: Any, call: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """Returns what ``call`` makes of the tensors, which it is given as they are sent."""
    check_compressor(compression)
    pairs = [compression.compress(tensor_of(tensor)) for tensor in tensors]
    results = call([tensor for tensor, _ in pairs])
    return [compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]


def grouped_allreduce(
    tensors: Sequence[Any],
    *,
    op: int | None,
    name: str | None,
    compression: Any,
    process_set: ProcessSet,
    average: bool | None = None,
    **scales: float,
) -> list[Any]:
    """Returns the tensors reduced over the ranks, as one unit; ``sparkvod.keras.collectives`` has the defaults."""
    code, members = ops.allreduce_op(op, average), ops.set_id(process_set)
    factors = scales["prescale_factor"], scales["postscale_factor"]
    return compressed(tensors, compression, lambda sent: reduced(sent, name, code, *factors, members))


def allreduce(value: Any, **arguments: Any) -> Any:
    """Returns the value reduced over the ranks."""
    return grouped_allreduce([value], **arguments)[0]


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Returns the root's value."""
    members, sent = ops.set_id(process_set), tensor_of(value)
    ops.check_root(root_rank, basics.size(), basics.world().ranks_of(members))

    def run(named: str, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        arguments: Any = {"in_place": False, "wake": False, "process_set": members}
        return [collectives.broadcast(arrays, values[0], named, root_rank, **arguments).wait()]

    def back(grads: Sequence[Any]) -> list[Any]:
        averaged = reduced(grads, grad_name(name), ops.Average, 1.0, 1.0, members)
        return [grad if basics.rank() == root_rank else jnp.zeros_like(grad) for grad in averaged]

    return with_gradient(lambda x: exchanged("jax.broadcast", name, members, run, [x]), back, [sent])[0]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when all ranks of the set have called it; not in code that JAX compiles."""
    members = ops.set_id(process_set)
    now("jax.barrier", None, lambda used: collectives.barrier(used, members), members)
