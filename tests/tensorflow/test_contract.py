"""The contract of all front ends, for TensorFlow: eager, and each collective inside a ``tf.function``."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.contracts.front_end import CHECKS, FrontEnd, join
from tests.contracts.worlds import Suite

pytest.importorskip("tensorflow", reason="the TensorFlow front end needs tensorflow")


class EagerFrontEnd(FrontEnd):
    module = "sparkvod.tensorflow"
    in_place = False
    handles = False

    def tensor(self, values: Any, dtype: str) -> Any:
        import tensorflow as tf

        return tf.cast(tf.constant(np.asarray(values)), dtype)

    def strided(self, values: Any, dtype: str) -> Any:
        import tensorflow as tf

        return tf.transpose(self.tensor(np.asarray(values).T.copy(), dtype))

    def values(self, tensor: Any) -> np.ndarray:
        import tensorflow as tf

        return (tf.cast(tensor, "float64") if tensor.dtype == tf.bfloat16 else tensor).numpy()

    def dtype(self, tensor: Any) -> str:
        return tensor.dtype.name

    def gradients(self, function: Callable[..., Any], inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        import tensorflow as tf

        leaves = [tf.Variable(values) for values in inputs]
        with tf.GradientTape() as tape:
            loss = function(*map(_Summed, leaves))
        return [tf.convert_to_tensor(grad).numpy() for grad in tape.gradient(loss, leaves)]


class _Summed:
    """A tensor that has the ``sum()`` that the checks call."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __mul__(self, other: Any) -> _Summed:
        return _Summed(self.tensor * getattr(other, "tensor", other))

    def __add__(self, other: Any) -> _Summed:
        return _Summed(self.tensor + getattr(other, "tensor", other))

    __radd__ = __add__

    def sum(self) -> Any:
        import tensorflow as tf

        return tf.reduce_sum(self.tensor)


class _Wrapping:
    """The module, whose collectives take and give ``_Summed`` where they get them."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if name not in GRAPHED:
            return found
        return functools.partial(_call, functools.partial(self._run, found))

    def _run(self, collective: Any, *args: Any, **kwargs: Any) -> Any:
        return collective(*args, **kwargs)


GRAPHED = (
    *("allreduce", "grouped_allreduce", "allgather", "grouped_allgather", "broadcast"),
    *("reducescatter", "grouped_reducescatter", "alltoall", "barrier"),
)


def _is_tensor(value: Any) -> bool:
    import tensorflow as tf

    return isinstance(value, (tf.Tensor, tf.Variable))


def _call(run: Any, *args: Any, **kwargs: Any) -> Any:
    first = args[0] if args else None
    group = first if isinstance(first, list) else [first]
    if not any(isinstance(value, _Summed) for value in group):
        return run(*args, **kwargs)
    plain = [value.tensor for value in group]
    result = run(plain if isinstance(first, list) else plain[0], *args[1:], **kwargs)
    if isinstance(result, (list, tuple)):
        return [_Summed(value) for value in result]
    return _Summed(result)


class _Graphed(_Wrapping):
    """Runs each collective inside a function, with its tensors as the function's arguments."""

    def _run(self, collective: Any, *args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        import sparkvod.tensorflow as hvd

        flat = tf.nest.flatten(list(args))
        places = [k for k, value in enumerate(flat) if _is_tensor(value)]

        @tf.function(autograph=False)
        def run(*tensors: Any) -> Any:
            for k, tensor in zip(places, tensors, strict=True):
                flat[k] = tensor
            return collective(*tf.nest.pack_sequence_as(list(args), flat), **kwargs)

        with hvd.own_errors():
            return run(*[tf.convert_to_tensor(flat[k]) for k in places])


class WrappedEagerFrontEnd(EagerFrontEnd):
    @property
    def hvd(self) -> Any:
        return _Wrapping(importlib.import_module(self.module))


class GraphFrontEnd(EagerFrontEnd):
    forks = False
    shapes = ((), (0,), (5, 7))  # each traces functions of its own

    @property
    def hvd(self) -> Any:
        return _Graphed(importlib.import_module(self.module))


# The same for all suites of this room, whose ranks are the same processes.
QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "KERAS_BACKEND": "tensorflow",
    "TF_NUM_INTEROP_THREADS": "2",
    "TF_NUM_INTRAOP_THREADS": "1",
}
SUITES = {
    "eager": Suite(CHECKS, [WrappedEagerFrontEnd()], join, env=QUIET, timeout=300),
    "function": Suite(CHECKS, [GraphFrontEnd()], join, env=QUIET, timeout=400),
}


@pytest.mark.timeout(420)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("check", SUITES["eager"].names)
def test_contract(check: str, mode: str, size: int, leave_to_full: Callable[[str], None]) -> None:
    if mode == "function" and size < 3:
        leave_to_full("functions on three ranks, and eager ones on as many, show it")
    SUITES[mode].verify(check, size)
