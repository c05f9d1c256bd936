"""The reduction of a list of gradients, as tapes and optimizers need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from sparkvod import config
from sparkvod.core import basics
from sparkvod.core.gradients import GradientPlan
from sparkvod.core.ops import CODES, set_id
from sparkvod.core.reducer import Gradient, plan_buckets
from sparkvod.tensorflow import naming, ops


@dataclass
class GradientReducer(GradientPlan):
    """Reduces gradients over the ranks.

    Attributes:
        prefix: beginning of the operations' names inside ``tf.function``.
    """

    prefix: str = "gradient"

    def __post_init__(self) -> None:
        set_id(self.process_set)
        super().__post_init__()

    def key(self, variable: Any) -> Any:
        """Returns what tells a variable from others, for TensorFlow's variables and Keras's over them."""
        inner = getattr(variable, "value", None)
        if not isinstance(variable, tf.Variable) and isinstance(inner, tf.Variable):
            variable = inner
        return variable.ref() if hasattr(variable, "ref") else id(variable)

    @ops.as_written
    def reduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the gradients, those of local variables scaled, the others reduced; None stays None.

        Args:
            grads: tensors, slices or None, one for each variable. The ranks must have None in the same places.
            variables: what they are the gradients of.

        Raises:
            HorovodInternalError: an eager reduction failed.
        """
        size = len(basics.world().ranks_of(set_id(self.process_set)))
        results = list(grads)
        places = []
        for k, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
            if grad is None:
                continue
            if self.is_local(variable):
                results[k] = _scaled(grad, 1.0 / size) if self.scale_local else grad
            else:
                places.append(k)
        if size == 1 or not self.process_set.included():
            return results
        dense = []
        for k in places:
            if isinstance(results[k], tf.IndexedSlices) and not self.sparse_as_dense:
                results[k] = self._slices(results[k], k)
                continue
            results[k] = tf.convert_to_tensor(results[k])
            dense.append(k)
        for number, group in enumerate(self._groups(dense, results, variables)):
            reduced = self._dense([results[k] for k in group], number, size)
            for k, grad in zip(group, reduced, strict=True):
                results[k] = grad
        return results

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
