"""The reduction of a list of gradients, as tapes and optimizers need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from sparkvod import config
from sparkvod.core.gradients import GradientPlan
from sparkvod.core.ops import CODES
from sparkvod.core.reducer import Gradient, plan_buckets
from sparkvod.tensorflow import naming, ops


@dataclass
class GradientReducer(GradientPlan):
    """Reduces gradients over the ranks.

    Attributes:
        prefix: beginning of the operations' names inside ``tf.function``.
    """

    prefix: str = "gradient"

    def key(self, variable: Any) -> Any:
        """Returns what tells a variable from others, for TensorFlow's variables and Keras's over them."""
        inner = getattr(variable, "value", None)
        if not isinstance(variable, tf.Variable) and isinstance(inner, tf.Variable):
            variable = inner
        return variable.ref() if hasattr(variable, "ref") else id(variable)

    @ops.as_written
    def reduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """As :meth:`GradientPlan.reduce`; gradients are tensors, slices or None."""
        return super().reduce(grads, variables)

    def divided(self, grad: Any, size: int) -> Any:
        """Returns a tensor or slices divided by the number of ranks."""
        return _scaled(grad, 1.0 / size)

    def exchange(self, grads: list[Any], places: list[int], variables: Sequence[Any], size: int) -> None:
        """Puts reduced gradients in the places of this rank's own."""
        dense = []
        for k in places:
            if isinstance(grads[k], tf.IndexedSlices) and not self.sparse_as_dense:
                grads[k] = self._slices(grads[k], k)
                continue
            grads[k] = tf.convert_to_tensor(grads[k])
            dense.append(k)
        for number, group in enumerate(self._groups(dense, grads, variables)):
            reduced = self._dense([grads[k] for k in group], number, size)
            for k, grad in zip(group, reduced, strict=True):
                grads[k] = grad

    def _groups(self, places: list[int], grads: Sequence[Any], variables: Sequence[Any]) -> list[list[int]]:
        # Eager operations run one after the other, so one of all gradients; in a graph they overlap with the backward
        # pass, so by buckets, as the gradients become ready: from the last on.
        if self.groups is not None or tf.executing_eagerly():
            return self.units(places, variables, together=True)
        sized = [k for k in places if grads[k].shape.is_fully_defined() and grads[k].dtype.name in CODES]
        gradients = [Gradient("", grads[k].shape.num_elements(), CODES[grads[k].dtype.name]) for k in sized]
        knobs = {name: config.get(name) for name in ("bucket_bytes", "first_bucket_bytes")}
        buckets = plan_buckets(gradients, prefix=self.prefix, **knobs)
        by_size = [[sized[slot.index] for slot in bucket.slots] for bucket in buckets]
        return [*by_size, *([k] for k in places if k not in sized)]

    def _slices(self, grad: tf.IndexedSlices, k: int) -> Any:
        name = None if tf.executing_eagerly() else naming.in_graph("allgather", f"{self.prefix}.{k}")
        return ops.allreduce(grad, op=self.op, name=name, compression=self.compression, process_set=self.process_set)

    def _dense(self, grads: list[Any], number: int, size: int) -> list[Any]:
        op, prescale, postscale = self.scales(size)
        name = None if tf.executing_eagerly() else naming.in_graph("allreduce", f"{self.prefix}.{number}")
        return ops.grouped_allreduce(
            grads,
            op=op,
            compression=self.compression,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=self.process_set,
            name=name,
        )


def distributed(plain: Any, mixin: type, reducer: GradientReducer) -> Any:
    """Returns a copy of a tape or optimizer, of a class derived from its own, with the mixin and its reducer."""
    base = type(plain)
    copy: Any = object.__new__(type(base.__name__, (mixin, base), {"__doc__": base.__doc__}))
    copy.__dict__.update(plain.__dict__)
    copy._reducer = reducer
    return copy


def _scaled(grad: Any, factor: float) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(_scaled(grad.values, factor), grad.indices, grad.dense_shape)
    return grad * tf.cast(factor, grad.dtype)
