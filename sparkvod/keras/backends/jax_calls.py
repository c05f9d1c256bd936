"""Functions of NumPy's arrays, called with JAX's: at once, or back from code that JAX compiles; with derivatives.

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

from sparkvod.core import ops
from sparkvod.core.names import now

Run = Callable[[str, Sequence[np.ndarray]], Sequence[np.ndarray]]
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
        if own is None or type(own).__name__ not in str(error):
            raise
        raise own from error


def tensor_of(value: Any) -> Any:
    """Returns a JAX array of an array, a number, or a variable of Keras."""
    return jnp.asarray(getattr(value, "value", value))


def traced(tensors: Sequence[Any]) -> bool:
    """Returns whether JAX is compiling (or differentiating) what the tensors belong to, so that they have no values."""
    return any(isinstance(tensor, jax.core.Tracer) for tensor in tensors)


def exchanged(
    kind: str, name: str | None, members: int, run: Run, tensors: Sequence[Any], shapes: Any = None
) -> list[Any]:
    """Applies a collective on NumPy's arrays to JAX's, now or in what is being traced.

    Args:
        kind: what operations without a name are named after.
        name: the operation's name, or None.
        members: number of the process set.
        run: the collective; it is given a name and the arrays.
        tensors: JAX's arrays.
        shapes: of the results, where they are not those of the tensors; their dtypes are.
    """

    def called(*values: Any) -> Sequence[np.ndarray]:
        global _failure
        host = [np.asarray(value) for value in values]
        try:
            return now(kind, name, lambda used: run(used, host), members)
        except BaseException as error:
            _failure = error
            raise

    if not traced(tensors):
        return [jnp.asarray(result) for result in called(*tensors)]
    shapes = [tensor.shape for tensor in tensors] if shapes is None else shapes
    results = [jax.ShapeDtypeStruct(shape, tensor.dtype) for shape, tensor in zip(shapes, tensors, strict=True)]
    return list(io_callback(called, results, *tensors, ordered=True))


def with_gradient(
    forward: Callable[..., list[Any]], backward: Callable[[Sequence[Any]], list[Any]], tensors: Sequence[Any]
) -> list[Any]:
    """Returns ``forward(*tensors)``, whose derivative is ``backward``.

    Args:
        forward: the collective.
        backward: returns the gradients of the tensors of float, of those of the results of float.
        tensors: JAX's arrays.
    """
    call = jax.custom_vjp(lambda *values: forward(*values))
    floats = floating(tensors)

    def back(_: Any, grads: Sequence[Any]) -> tuple[Any, ...]:
        placed: list[Any] = [np.zeros(tensor.shape, jax.dtypes.float0) for tensor in tensors]
        for k, grad in zip(floats, backward([grads[k] for k in floats]), strict=True):
            placed[k] = grad
        return tuple(placed)

    call.defvjp(lambda *values: (forward(*values), None), back)
    return list(call(*tensors))


def floating(tensors: Sequence[Any]) -> list[int]:
    """Returns the places of the tensors of float, which alone have gradients."""
    return [k for k, tensor in enumerate(tensors) if jnp.issubdtype(tensor.dtype, jnp.floating)]


def grad_name(name: str | None) -> str | None:
    """Returns the name of the collective that belongs to another one's derivative."""
    return None if name is None else f"{name}.grad"


def check_differentiable(op: int) -> None:
    """As :func:`sparkvod.core.ops.check_differentiable`."""
    ops.check_differentiable(op, "put jax.lax.stop_gradient around it")
