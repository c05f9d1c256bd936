"""``DistributedOptimizer`` for optimizers of TF1 and, through ``sparkvod.keras``, of Keras 3."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import tensorflow as tf

from sparkvod.core.gradients import groups_of
from sparkvod.core.ops import Average
from sparkvod.core.process_sets import ProcessSet, global_process_set
from sparkvod.tensorflow.accumulation import Accumulation
from sparkvod.tensorflow.compression import Compression
from sparkvod.tensorflow.gradients import GradientReducer, distributed


class _Distributed(tf.compat.v1.train.Optimizer):
    """What a distributed optimizer of TF1 does differently; mixed in before the user's class."""

    _reducer: GradientReducer
    _accumulation: Accumulation | None = None

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Returns pairs of gradient and variable as the wrapped optimizer does, reduced over the ranks.

        With ``backward_passes_per_step`` they are zeros, of which no step is made, but for each last pass.
        """
        pairs = super().compute_gradients(*args, **kwargs)
        variables = [variable for _, variable in pairs]
        combine = self._reducer.reduce if self._accumulation is None else self._accumulation.add
        return list(zip(combine([grad for grad, _ in pairs], variables), variables, strict=True))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the step, and counts ``global_step``, as the wrapped optimizer does; if enough passes were summed."""
        step = functools.partial(super().apply_gradients, *args, **kwargs)
        return step() if self._accumulation is None else self._accumulation.when_due(step)

    def register_local_var(self, var: Any) -> None:
        """Says that a variable's gradient is not reduced."""
        self._reducer.register_local(var)


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes an optimizer reduce its gradients over all ranks, and returns it.

    It is of a class derived from the optimizer's own, with its name. One of Keras 3 is the given one, changed; one of
    TF1 is a copy, whose ``compute_gradients`` reduces.

    Args:
        optimizer: of Keras 3, or of ``tf.compat.v1.train``.
        name: a new name for one of Keras.
        use_locking: not used.
        device_dense: not used.
        device_sparse: not used.
        compression: ``Compression.none``, ``.fp16``, ``.bf16``, or a class with ``compress`` and ``decompress``.
        sparse_as_dense: makes gradients that are ``tf.IndexedSlices`` dense; else they are gathered.
        backward_passes_per_step: gradients that are summed locally before they are reduced and a step is made.
        op: ``Average`` or ``Sum``.
        gradient_predivide_factor: with ``Average``: gradients are divided by it before the sum and by the rest of the
            number of ranks after it.
        average_aggregated_gradients: divides the local sum by the number of its gradients.
        num_groups: deprecated; use ``groups``.
        groups: what is reduced as one unit: a number of groups of consecutive gradients, or lists of variables.
        process_set: the ranks that exchange gradients, by default all; an average is one over these.
        scale_local_gradients: whether gradients of local variables are divided by the number of ranks.

    Raises:
        ValueError: an argument cannot be used; the optimizer is of another kind and cannot be distributed; the process
            set is not registered, or this rank is none of its.
    """
    arguments = {
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "backward_passes_per_step": backward_passes_per_step,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "num_groups": num_groups,
        "groups": groups,
        "process_set": process_set,
        "average_aggregated_gradients": average_aggregated_gradients,
        "scale_local_gradients": scale_local_gradients,
    }
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _distribute_v1(optimizer, **arguments)
    if not _is_of_keras(optimizer):
        raise ValueError(
            f"an optimizer of class {type(optimizer).__module__}.{type(optimizer).__qualname__} was found, one of "
            "keras.optimizers (Keras 3) or tf.compat.v1.train was expected; for others reduce the gradients by "
            "DistributedGradientTape before they are applied"
        )
    keras = importlib.import_module("sparkvod.tensorflow.keras")
    return keras.DistributedOptimizer(optimizer, name=name, **arguments)


def _is_of_keras(optimizer: Any) -> bool:
    # Without importing Keras, which is slow; what has no stateless_apply is of Keras 2.
    return any(each.__module__.startswith("keras.src.optimizers") for each in type(optimizer).__mro__) and hasattr(
        optimizer, "stateless_apply"
    )


def _distribute_v1(
    optimizer: tf.compat.v1.train.Optimizer,
    compression: Any,
    sparse_as_dense: bool,
    backward_passes_per_step: int,
    op: int,
    gradient_predivide_factor: float,
    num_groups: int,
    groups: Any,
    process_set: ProcessSet,
    average_aggregated_gradients: bool,
    scale_local_gradients: bool,
) -> Any:
    passes = backward_passes_per_step
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step={passes} was found, a positive number was expected")
    if isinstance(optimizer, _Distributed):
        raise ValueError("an optimizer that is already distributed was found, a plain one was expected; wrap it once")
    reducer = GradientReducer(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        predivide=gradient_predivide_factor,
        groups=groups_of(groups, num_groups),
        process_set=process_set,
        scale_local=scale_local_gradients,
        prefix="optimizer",
    )
    result = distributed(optimizer, _Distributed, reducer)
    if passes > 1:
        result._accumulation = Accumulation(reducer, passes, average_aggregated_gradients)
    return result
