"""Keras on JAX: the engine is called back from compiled code, with the arrays in the host's memory.

The callbacks are ordered, so that all ranks make them in the same order; JAX waits in them for the other ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import keras
import numpy as np
from jax import numpy as jnp
from jax.experimental import io_callback

from sparkvod.core import basics, collectives
from sparkvod.core.compression import CastCompressor, Compressors, cast_compressor
from sparkvod.core.gradients import GradientPlan
from sparkvod.core.ops import Average, allreduce_op, reducescatter_op, set_id
from sparkvod.core.process_sets import ProcessSet, global_process_set
from sparkvod.keras.backends import arrays

__all__ = [
    "COMPILES",
    "Compression",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_variables",
    "cond",
    "own_errors",
    "reducer",
    "reducescatter",
]

#: Whether a compiled step can hold a collective.
COMPILES = True


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


_failure: Any = None


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
        if own is None or not re.search(rf"\b{type(own).__name__}\b", str(error)):
            raise
        raise own from error


def _exchanged(call: Callable[..., Sequence[np.ndarray]], tensors: Sequence[Any], shapes: Any = None) -> list[Any]:
    # Applies a function of NumPy's arrays to JAX's, eagerly or in what is being traced; ``shapes`` is what comes out
    # then, what goes in when None.
    if not any(isinstance(tensor, jax.core.Tracer) for tensor in tensors):
        return [jnp.asarray(result) for result in call(*map(np.asarray, tensors))]
    shapes = shapes or [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in tensors]

    def called(*values: Any) -> Sequence[np.ndarray]:
        global _failure
        try:
            return call(*map(np.asarray, values))
        except BaseException as error:
            _failure = error
            raise

    return list(io_callback(called, shapes, *tensors, ordered=True))


def _tensor(value: Any) -> Any:
    return jnp.asarray(getattr(value, "value", value))


def _named(kind: str, name: str | None, process_set: int, run: Callable[[str], Any]) -> Any:
    if name is not None:
        return run(name)
    world, kind = basics.world(), f"{kind}.{process_set}"
    borrowed = world.borrow_name(kind)
    try:
        return run(borrowed)
    finally:
        world.return_name(kind, borrowed)


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
    """Returns the value reduced over the ranks, eagerly or in compiled code. Not differentiable."""
    code, members = allreduce_op(op, average), set_id(process_set)
    sent, context = compression.compress(_tensor(value))
    reduced = _reduced([sent], name, code, prescale_factor, postscale_factor, members)
    return compression.decompress(reduced[0], context)


def _reduced(
    tensors: Sequence[Any], name: str | None, op: int, prescale: float, postscale: float, members: int
) -> list[Any]:
    def run(*values: np.ndarray) -> list[np.ndarray]:
        def call(named: str) -> list[np.ndarray]:
            return collectives.grouped_allreduce(
                arrays, values, named, op, prescale, postscale, in_place=False, wake=False, process_set=members
            ).wait()

        return _named("keras.allreduce", name, members, call)

    return _exchanged(run, tensors)


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Returns the ranks' values, one behind the other; not in compiled code, which must know its shapes.

    Raises:
        ValueError: it is called in code that JAX compiles.
    """
    members, sent = set_id(process_set), _tensor(value)
    if isinstance(sent, jax.core.Tracer):
        raise ValueError(
            "an allgather was found in code that JAX compiles, which cannot know how many rows there will be; call it "
            "outside, or allreduce an array in which each rank has its own place"
        )

    def run(array: np.ndarray) -> list[np.ndarray]:
        def call(named: str) -> list[np.ndarray]:
            return [collectives.allgather(arrays, array, named, wake=False, process_set=members).wait()[0]]

        return _named("keras.allgather", name, members, call)

    return _exchanged(run, [sent])[0]


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Returns the root's value, eagerly or in compiled code. Not differentiable."""
    members = set_id(process_set)

    def run(array: np.ndarray) -> list[np.ndarray]:
        def call(named: str) -> list[np.ndarray]:
            return [
                collectives.broadcast(
                    arrays, array, named, root_rank, in_place=False, wake=False, process_set=members
                ).wait()
            ]

        return _named("keras.broadcast", name, members, call)

    return _exchanged(run, [_tensor(value)])[0]


def reducescatter(
    value: Any, name: str | None = None, op: int | None = Average, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns this rank's rows of the reduced value, eagerly or in compiled code. Not differentiable."""
    code, members, sent = reducescatter_op(op), set_id(process_set), _tensor(value)
    if not sent.ndim:
        raise ValueError("reducescatter of a scalar was found, at least one dimension was expected; reshape it")
    ranks = basics.world().ranks_of(members)
    place = ranks.index(basics.rank()) if basics.rank() in ranks else len(ranks)
    rows = sent.shape[0] // len(ranks) + (place < sent.shape[0] % len(ranks))

    def run(array: np.ndarray) -> list[np.ndarray]:
        def call(named: str) -> list[np.ndarray]:
            return collectives.reducescatter(arrays, [array], named, code, wake=False, process_set=members).wait()

        return _named("keras.reducescatter", name, members, call)

    return _exchanged(run, [sent], [jax.ShapeDtypeStruct((rows, *sent.shape[1:]), sent.dtype)])[0]


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Overwrites Keras's variables with the root's values."""
    for number, variable in enumerate(variables):
        variable.assign(broadcast(variable, root_rank, f"broadcast.variable.{number}"))


def cond(pred: Any, true_fn: Callable[[], None], false_fn: Callable[[], None], variables: Sequence[Any]) -> None:
    """Calls one of two functions, which assign to some of the variables.

    JAX's branches may only return values, so each runs in a scope that catches what it assigns.
    """

    def caught(function: Callable[[], None], values: Sequence[Any]) -> list[Any]:
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))) as scope:
            function()
        return [scope.get_current_value(variable) for variable in variables]

    before = [variable.value for variable in variables]
    after = jax.lax.cond(pred, lambda v: caught(true_fn, v), lambda v: caught(false_fn, v), before)
    for variable, value in zip(variables, after, strict=True):
        variable.assign(value)


class _Reducer(GradientPlan):
    """Reduces gradients over the ranks, all as one unit or by groups."""

    def __post_init__(self) -> None:
        set_id(self.process_set)
        super().__post_init__()

    def reduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the gradients, those of local variables scaled, the others reduced; None stays None."""
        members = set_id(self.process_set)
        size = len(basics.world().ranks_of(members))
        results = list(grads)
        places = []
        for k, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
            if grad is None:
                continue
            if self.is_local(variable):
                results[k] = grad / size if self.scale_local else grad
            else:
                places.append(k)
        if size == 1 or not self.process_set.included():
            return results
        op, prescale, postscale = self.scales(size)
        for number, group in enumerate(self.units(places, variables, together=True)):
            pairs = [self.compression.compress(results[k]) for k in group]
            reduced = _reduced(
                [tensor for tensor, _ in pairs], f"keras.gradients.{number}", op, prescale, postscale, members
            )
            for k, tensor, (_, context) in zip(group, reduced, pairs, strict=True):
                results[k] = self.compression.decompress(tensor, context)
        return results


def reducer(process_set: ProcessSet, **arguments: Any) -> _Reducer:
    """Returns what reduces gradients."""
    return _Reducer(process_set=process_set, **arguments)
