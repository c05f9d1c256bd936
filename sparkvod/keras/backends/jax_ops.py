"""Collectives on JAX's arrays, eager and in code that JAX compiles, with their derivatives.

In compiled code the engine is called back, with the arrays in the host's memory. These callbacks are ordered, so that
all ranks make them in the same order; JAX waits in them for the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.experimental import io_callback

from sparkvod.core import basics, collectives, ops
from sparkvod.core.compression import (
    CastCompressor,
    Compressors,
    cast_compressor,
    check_compressor,
)
from sparkvod.core.names import now
from sparkvod.core.process_sets import ProcessSet, global_process_set
from sparkvod.keras.backends import arrays

Run = Callable[[str, Sequence[np.ndarray]], Sequence[np.ndarray]]
_failure: Any = None


class _Caster:
    @staticmethod
    def is_floating(tensor: Any) -> bool:
        return bool(jnp.issubdtype(tensor.dtype, jnp.floating))

    @staticmethod
    def dtype(tensor: Any) -> Any:
        return tensor.dtype

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tensor.astype(dtype)


FP16Compressor: type[CastCompressor] = cast_compressor("FP16Compressor", "float16", _Caster, __name__)
BF16Compressor: type[CastCompressor] = cast_compressor("BF16Compressor", "bfloat16", _Caster, __name__)


class Compression(Compressors):
    """The compressors there are, as :class:`sparkvod.core.compression.Compressors` tells."""

    fp16 = FP16Compressor
    bf16 = BF16Compressor


@contextmanager
def own_errors() -> Iterator[None]:
    """Raises what a collective in compiled code failed with as sparkvod's error, instead of JAX's around its text."""
    global _failure
    _failure = None
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        own, _failure = _failure, None
        # The text is JAX's; that it is of this failure is said by its class in it.
        if own is None or type(own).__name__ not in str(error):
            raise
        raise own from error


def tensor_of(value: Any) -> Any:
    """Returns a JAX array of an array, a number, or a variable of Keras."""
    return jnp.asarray(getattr(value, "value", value))


def _traced(tensors: Sequence[Any]) -> bool:
    return any(isinstance(tensor, jax.core.Tracer) for tensor in tensors)


def _exchanged(
    kind: str, name: str | None, members: int, run: Run, tensors: Sequence[Any], shapes: Any = None
) -> list[Any]:
    # Applies a function of NumPy's arrays to JAX's, now or in what is being traced; ``shapes`` are what comes out, by
    # default what goes in.
    def called(*values: Any) -> Sequence[np.ndarray]:
        global _failure
        host = [np.asarray(value) for value in values]
        try:
            return now(kind, name, lambda used: run(used, host), members)
        except BaseException as error:
            _failure = error
            raise

    if not _traced(tensors):
        return [jnp.asarray(result) for result in called(*tensors)]
    shapes = shapes or [tensor.shape for tensor in tensors]
    results = [jax.ShapeDtypeStruct(shape, tensor.dtype) for shape, tensor in zip(shapes, tensors, strict=True)]
    return list(io_callback(called, results, *tensors, ordered=True))


def _with_gradient(
    forward: Callable[..., list[Any]], backward: Callable[[Sequence[Any]], list[Any]], tensors: Sequence[Any]
) -> list[Any]:
    # ``backward`` gets the gradients of the results, in arrays of float, and returns those of the tensors.
    call = jax.custom_vjp(lambda *values: forward(*values))
    floats = [k for k, tensor in enumerate(tensors) if jnp.issubdtype(tensor.dtype, jnp.floating)]

    def back(_: Any, grads: Sequence[Any]) -> tuple[Any, ...]:
        placed: list[Any] = [np.zeros(tensor.shape, jax.dtypes.float0) for tensor in tensors]
        for k, grad in zip(floats, backward([grads[k] for k in floats]), strict=True):
            placed[k] = grad
        return tuple(placed)

    call.defvjp(lambda *values: (forward(*values), None), back)
    return list(call(*tensors))


def _grad(name: str | None) -> str | None:
    return None if name is None else f"{name}.grad"


def _differentiable(op: int) -> None:
    ops.check_differentiable(op, "put jax.lax.stop_gradient around it")


def reduced(
    tensors: Sequence[Any], name: str | None, op: int, prescale: float, postscale: float, members: int
) -> list[Any]:
    """Returns the tensors reduced over the ranks of a process set, as one unit."""

    def run(named: str, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return collectives.grouped_allreduce(
            arrays, values, named, op, prescale, postscale, in_place=False, wake=False, process_set=members
        ).wait()

    def back(grads: Sequence[Any]) -> list[Any]:
        _differentiable(op)
        return reduced(grads, _grad(name), op, prescale, postscale, members)

    return _with_gradient(lambda *values: _exchanged("jax.allreduce", name, members, run, values), back, tensors)


def _compressed(tensors: Sequence[Any], compression: Any, call: Callable[[list[Any]], list[Any]]) -> list[Any]:
    check_compressor(compression)
    pairs = [compression.compress(tensor_of(tensor)) for tensor in tensors]
    results = call([tensor for tensor, _ in pairs])
    return [compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]


def grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Returns the tensors reduced over the ranks, as one unit."""
    code, members = ops.allreduce_op(op, average), ops.set_id(process_set)
    scales = prescale_factor, postscale_factor
    return _compressed(tensors, compression, lambda sent: reduced(sent, name, code, *scales, members))


def allreduce(value: Any, **arguments: Any) -> Any:
    """Returns the value reduced over the ranks."""
    return grouped_allreduce([value], **arguments)[0]


def _gathered(
    tensors: Sequence[Any], name: str | None, members: int, shapes: Any = None
) -> tuple[list[Any], list[list[int]]]:
    by_rank: list[list[int]] = []

    def run(named: str, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        found = collectives.grouped_allgather(arrays, values, named, wake=False, process_set=members).wait()
        by_rank[:] = [rows for _, rows in found]
        return [result for result, _ in found]

    return _exchanged("jax.allgather", name, members, run, tensors, shapes), by_rank


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns the ranks' tensors, one behind the other, as one unit; not in code that JAX compiles.

    Raises:
        ValueError: it is called in code that JAX compiles, which must know how many rows there will be.
    """
    members, sent = ops.set_id(process_set), [tensor_of(tensor) for tensor in tensors]
    rows: list[list[int]] = []

    def forward(*values: Any) -> list[Any]:
        if _traced(values):
            raise ValueError(
                "an allgather was found in code that JAX compiles, which cannot know how many rows there will be; call "
                "it outside, or allreduce an array in which each rank has its own place"
            )
        results, rows[:] = _gathered(values, name, members)
        return results

    def back(grads: Sequence[Any]) -> list[Any]:
        place = basics.world().ranks_of(members).index(basics.rank())
        averaged = reduced(grads, _grad(name), ops.Average, 1.0, 1.0, members)
        floats = [k for k, tensor in enumerate(sent) if jnp.issubdtype(tensor.dtype, jnp.floating)]
        begins = [(sum(rows[k][:place]), rows[k][place]) for k in floats]
        return [
            grad[begin : begin + count].reshape(sent[k].shape)
            for grad, k, (begin, count) in zip(averaged, floats, begins, strict=True)
        ]

    return _with_gradient(forward, back, sent)


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Returns the ranks' values, one behind the other."""
    return grouped_allgather([value], name, process_set)[0]


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Returns the root's value."""
    members, sent = ops.set_id(process_set), tensor_of(value)
    ops.check_root(root_rank, basics.size())

    def run(named: str, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        arguments: Any = {"in_place": False, "wake": False, "process_set": members}
        return [collectives.broadcast(arrays, values[0], named, root_rank, **arguments).wait()]

    def back(grads: Sequence[Any]) -> list[Any]:
        averaged = reduced(grads, _grad(name), ops.Average, 1.0, 1.0, members)
        return [grad if basics.rank() == root_rank else jnp.zeros_like(grad) for grad in averaged]

    return _with_gradient(lambda x: _exchanged("jax.broadcast", name, members, run, [x]), back, [sent])[0]


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
            _differentiable(code)
            scale = prescale_factor * postscale_factor * (len(ranks) if code == ops.Sum else 1)
            whole = [tensor.shape for tensor in sent if jnp.issubdtype(tensor.dtype, jnp.floating)]
            return [grad * scale for grad in _gathered(grads, _grad(name), members, whole)[0]]

        return _with_gradient(
            lambda *values: _exchanged("jax.reducescatter", name, members, run, values, shapes), back, sent
        )

    return _compressed(tensors, compression, scattered)


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
        ValueError: the splits are no integers, or it is called with splits in code that JAX compiles.
    """
    members, sent = ops.set_id(process_set), tensor_of(value)
    ops.check_rows(sent.ndim, "alltoall", "reshape it")
    counts = None if splits is None else _splits(splits)
    received: list[int] = []

    def forward(x: Any) -> list[Any]:
        if _traced([x]) and counts is not None:
            raise ValueError("an alltoall with splits was found in code that JAX compiles, none were expected there")
        return _exchanged("jax.alltoall", name, members, _alltoall(counts, members, received), [x])

    def back(grads: Sequence[Any]) -> list[Any]:
        there = None if counts is None else list(received)
        run = _alltoall(there, members, [])
        (grad,) = _exchanged("jax.alltoall", _grad(name), members, run, grads)
        missing = sent.shape[0] - grad.shape[0]
        return [jnp.concatenate([grad, jnp.zeros((missing, *grad.shape[1:]), grad.dtype)]) if missing else grad]

    (result,) = _with_gradient(forward, back, [sent])
    return result if splits is None else (result, jnp.asarray(received, "int32"))


def _alltoall(splits: list[int] | None, members: int, received: list[int]) -> Run:
    def run(named: str, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        result, received[:] = collectives.alltoall(
            arrays, values[0], named, splits, wake=False, process_set=members
        ).wait()
        return [result]

    return run


def _splits(splits: Any) -> list[int]:
    found = np.asarray(splits)
    if found.dtype.kind not in "iu" or found.ndim != 1:
        raise ValueError(
            f"splits of {found.dtype} with {found.ndim} dimensions were found, integers in one dimension, one for each "
            "rank, were expected"
        )
    return [int(split) for split in found]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when all ranks of the set have called it; not in code that JAX compiles."""
    members = ops.set_id(process_set)
    now("jax.barrier", None, lambda used: collectives.barrier(used, members), members)
