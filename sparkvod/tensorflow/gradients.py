"""The reduction of a list of gradients, as tapes and optimizers need it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from sparkvod.core import basics
from sparkvod.core.ops import Average, predivide_scales, reduce_op, set_id
from sparkvod.core.process_sets import ProcessSet, global_process_set
from sparkvod.tensorflow import naming, ops
from sparkvod.tensorflow.compression import Compression


def groups_of(groups: Any, num_groups: int) -> Any:
    """Returns the ``groups`` argument that two arguments ask for; ``num_groups`` is the deprecated one.

    Raises:
        ValueError: it is neither a number nor a list of lists.
    """
    if num_groups:
        warnings.warn("num_groups= is deprecated, use groups=", DeprecationWarning, stacklevel=4)
        groups = num_groups if groups is None else groups
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0):
        return groups or None
    if isinstance(groups, (list, tuple)) and all(isinstance(group, (list, tuple)) for group in groups):
        return [list(group) for group in groups]
    raise ValueError(f"groups={groups!r} was found, a number of groups or lists of variables were expected")


def key_of(variable: Any) -> Any:
    """Returns what tells a variable from others, for TensorFlow's variables and Keras's over them."""
    inner = getattr(variable, "value", None)
    if not isinstance(variable, tf.Variable) and isinstance(inner, tf.Variable):
        variable = inner
    return variable.ref() if hasattr(variable, "ref") else id(variable)


@dataclass
class GradientReducer:
    """Reduces gradients over the ranks.

    Attributes:
        compression: what dense gradients are sent as.
        sparse_as_dense: whether ``tf.IndexedSlices`` are made dense before.
        op: ``Average`` or ``Sum``.
        predivide: gradient_predivide_factor, with ``Average``.
        groups: None, a number of groups, or lists of variables.
        process_set: among which ranks; the gradients of a rank outside it stay as they are.
        scale_local: whether gradients of local variables are divided by the number of ranks.
        prefix: beginning of the operations' names inside ``tf.function``.
    """

    compression: Any = Compression.none
    sparse_as_dense: bool = False
    op: int = Average
    predivide: float = 1.0
    groups: Any = None
    process_set: ProcessSet = global_process_set
    scale_local: bool = True
    prefix: str = "gradient"
    local: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        set_id(self.process_set)
        self.op = reduce_op(self.op)
        if self.predivide != 1.0 and self.op != Average:
            raise ValueError(
                f"gradient_predivide_factor={self.predivide} was found with op=Sum, it was expected with op=Average "
                "only; leave it out"
            )
        if self.predivide <= 0:
            raise ValueError(f"gradient_predivide_factor={self.predivide} was found, a positive one was expected")

    def register_local(self, variable: Any) -> None:
        """Says that a variable's gradient is this rank's own business."""
        self.local.add(key_of(variable))

    def is_local(self, variable: Any) -> bool:
        """Returns whether the variable was registered as local."""
        return bool(self.local) and key_of(variable) in self.local

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
            if isinstance(results[k], tf.IndexedSlices):
                if not self.sparse_as_dense:
                    results[k] = self._slices(results[k], k)
                    continue
                results[k] = tf.convert_to_tensor(results[k])
            dense.append(k)
        for number, group in enumerate(self._grouped(dense, variables)):
            reduced = self._dense([results[k] for k in group], number)
            for k, grad in zip(group, reduced, strict=True):
                results[k] = grad
        return results

    def _slices(self, grad: tf.IndexedSlices, k: int) -> Any:
        name = None if tf.executing_eagerly() else naming.in_graph("allgather", f"{self.prefix}.{k}")
        return ops.allreduce(grad, op=self.op, name=name, compression=self.compression, process_set=self.process_set)

    def _dense(self, grads: list[Any], number: int) -> list[Any]:
        op, prescale, postscale = self.op, 1.0, 1.0
        if self.predivide != 1.0:
            op = ops.Sum
            prescale, postscale = predivide_scales(
                self.predivide, len(basics.world().ranks_of(set_id(self.process_set)))
            )
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

    def _grouped(self, places: list[int], variables: Sequence[Any]) -> list[list[int]]:
        # Eager operations run one after the other, so one of all gradients; in a graph they overlap with the backward
        # pass, so one for each, which the engine fuses.
        if not places:
            return []
        if self.groups is None:
            return [places] if tf.executing_eagerly() else [[k] for k in places]
        if isinstance(self.groups, int):
            number = min(self.groups, len(places))
            bounds = [len(places) * n // number for n in range(number + 1)]
            return [places[first:end] for first, end in zip(bounds, bounds[1:], strict=False)]
        group_of = {key_of(variable): n for n, group in enumerate(self.groups) for variable in group}
        grouped: dict[Any, list[int]] = {}
        for k in places:
            grouped.setdefault(group_of.get(key_of(variables[k]), ("alone", k)), []).append(k)
        return list(grouped.values())


def _scaled(grad: Any, factor: float) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(_scaled(grad.values, factor), grad.indices, grad.dense_shape)
    return grad * tf.cast(factor, grad.dtype)
