"""``DistributedOptimizer`` for optimizers of TF1; those of Keras are wrapped by ``sparkvod.keras``."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sparkvod.core.gradients import groups_of
from sparkvod.core.ops import Average
from sparkvod.core.process_sets import ProcessSet, global_process_set
from sparkvod.tensorflow.compression import Compression
from sparkvod.tensorflow.gradients import GradientReducer, distributed


class _Distributed(tf.compat.v1.train.Optimizer):
    """What a distributed optimizer of TF1 does differently; mixed in before the user's class."""

    _reducer: GradientReducer

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Returns pairs of gradient and variable as the wrapped optimizer does, reduced over the ranks."""
        pairs = super().compute_gradients(*args, **kwargs)
        variables = [variable for _, variable in pairs]
        grads = self._reducer.reduce([grad for grad, _ in pairs], variables)
        return list(zip(grads, variables, strict=True))

    def register_local_var(self, var: Any) -> None:
        """Says that a variable's gradient is not reduced."""
        self._reducer.register_local(var)


def distribute_v1(
    optimizer: tf.compat.v1.train.Optimizer,
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns an optimizer whose ``compute_gradients`` reduces over all ranks.

    It is of a class derived from the optimizer's own, with its name. The arguments are those of
    ``sparkvod.tensorflow.DistributedOptimizer``.

    Raises:
        ValueError: an argument cannot be used.
    """
    if backward_passes_per_step != 1:
        raise ValueError(
            f"backward_passes_per_step={backward_passes_per_step} was found with an optimizer of TF1, 1 was expected; "
            "use an optimizer of Keras, or sum the gradients before apply_gradients"
        )
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
    return distributed(optimizer, _Distributed, reducer)
