"""Gradients that an optimizer of TF1 sums up before they are reduced, in a graph, a ``tf.function`` or eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

Reduce = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


class Accumulation:
    """The sums, in variables that are neither trained nor saved, and the condition on which they are used.

    Args:
        reducer: reduces gradients over the ranks.
        passes: how many gradients are summed.
        average: whether the sum is divided by that number.
    """

    def __init__(self, reducer: Any, passes: int, average: bool) -> None:
        self._reducer, self._passes, self._average = reducer, passes, average
        self._sums: dict[Any, Any] = {}
        self._counter: Any = None
        self._due: Any = None

    def add(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Adds gradients to the sums; returns these, reduced, with each last pass, and else zeros.

        Args:
            grads: tensors, slices, which become dense, or None.
            variables: what they are the gradients of.
        """
        there = [k for k, grad in enumerate(grads) if grad is not None]
        added = [tf.convert_to_tensor(grads[k]) for k in there]
        if self._counter is None:
            self._counter = _local(tf.int32, [])
        sums = [self._sum(variables[k], grad) for k, grad in zip(there, added, strict=True)]
        totals = [total + grad for total, grad in zip(sums, added, strict=True)]
        passes = self._counter + 1
        self._due = passes >= self._passes

        def reduced() -> list[Any]:
            ready: list[Any] = [None] * len(grads)
            for k, total in zip(there, totals, strict=True):
                ready[k] = total / self._passes if self._average else total
            ready = self._reducer.reduce(ready, variables)
            # Copies, since a dependency on tensors from outside of the branch would not hold: the sums might be reset
            # before they were read.
            with tf.control_dependencies([tf.identity(total) for total in (passes, *totals)]):
                reset = [_assigned(self._counter, 0), *(_assigned(total, tf.zeros_like(total)) for total in sums)]
            with tf.control_dependencies([done for done in reset if done is not None]):
                return [tf.identity(tf.convert_to_tensor(ready[k])) for k in there]

        def kept() -> list[Any]:
            changes = [_assigned(self._counter, passes)]
            changes += [_assigned(total, value) for total, value in zip(sums, totals, strict=True)]
            with tf.control_dependencies([done for done in changes if done is not None]):
                return [tf.zeros_like(value) for value in totals]

        results: list[Any] = [None] * len(grads)
        # Always a list, also of one, which tf.cond would unpack.
        for k, result in zip(there, tf.nest.flatten(tf.cond(self._due, reduced, kept)), strict=True):
            results[k] = result
        return results

    def when_due(self, apply: Callable[[], Any]) -> Any:
        """Makes the step if the gradients that were computed last are reduced ones; returns an operation in a graph."""
        if self._due is None:
            return apply()

        def step() -> Any:
            done = apply()
            with tf.control_dependencies([] if done is None else [done]):
                return tf.constant(True)

        made = tf.cond(self._due, step, lambda: tf.constant(False))
        return None if tf.executing_eagerly() else tf.group(made)

    def _sum(self, variable: Any, grad: Any) -> Any:
        key = self._reducer.key(variable)
        if key not in self._sums:
            self._sums[key] = _local(grad.dtype, variable.shape)
        return self._sums[key]


def _local(dtype: Any, shape: Any) -> Any:
    # Made where functions and branches leave it; in a TF1 graph its initializer is among the local variables' ones.
    with tf.init_scope():
        return tf.compat.v1.Variable(
            tf.zeros(shape, dtype),
            trainable=False,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
            name="sparkvod_accumulated",
        )


def _assigned(variable: Any, value: Any) -> Any:
    return variable.assign(value, read_value=False)
