"""``DistributedGradientTape``: a gradient tape whose gradients are reduced over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sparkvod.core.gradients import groups_of
from sparkvod.core.ops import Average
from sparkvod.core.process_sets import ProcessSet, global_process_set
from sparkvod.tensorflow.compression import Compression
from sparkvod.tensorflow.gradients import GradientReducer, distributed

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]


class _Distributed(tf.GradientTape):
    """What a distributed tape does differently; mixed in before the tape's class."""

    _reducer: GradientReducer

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Returns the gradients as the wrapped tape does, reduced over the ranks.

        Args:
            target: what is differentiated.
            sources: by what: variables or tensors, in any structure.
            output_gradients: the gradient of each element of ``target``.
            unconnected_gradients: what stands for a gradient that there is not.
            use_generic_names: not used: names do not depend on the variables' ones.

        Raises:
            HorovodInternalError: the reduction failed, outside ``tf.function``.
        """
        grads = super().gradient(target, sources, output_gradients, unconnected_gradients)
        flat = self._reducer.reduce(tf.nest.flatten(grads), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(sources, flat)

    def register_local_source(self, source: Any) -> None:
        """Says that the gradient of a source is not reduced, and divided by the number of ranks if so asked."""
        self._reducer.register_local(source)

    def get_local_and_global_gradients(self, grads: Sequence[Any], sources: Sequence[Any]) -> Any:
        """Returns (gradients of local sources, gradients of the others), in their order."""
        pairs = list(zip(grads, sources, strict=True))
        return (
            [grad for grad, source in pairs if self._reducer.is_local(source)],
            [grad for grad, source in pairs if not self._reducer.is_local(source)],
        )


def DistributedGradientTape(  # noqa: N802
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns a tape that records what ``gradtape`` does, and whose ``gradient`` reduces over all ranks.

    Args:
        gradtape: the tape, persistent or not, which may have recorded already; use the result in its place.
        device_dense: not used.
        device_sparse: not used.
        compression: ``Compression.none``, ``.fp16``, ``.bf16``, or a class with ``compress`` and ``decompress``.
        sparse_as_dense: makes gradients that are ``tf.IndexedSlices`` dense; else they are gathered.
        op: ``Average`` or ``Sum``.
        gradient_predivide_factor: with ``Average``: gradients are divided by it before the sum and by the rest of the
            number of ranks after it.
        num_groups: deprecated; use ``groups``.
        groups: what is reduced as one unit: a number of groups of consecutive gradients, or lists of variables.
        process_set: the ranks that exchange gradients, by default all; an average is one over these.
        scale_local_gradients: whether gradients of local sources are divided by the number of ranks.

    Raises:
        TypeError: ``gradtape`` or the process set is something else.
        ValueError: an argument cannot be used; the process set is not registered, or this rank is none of its.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"a {type(gradtape).__name__} was found, a tf.GradientTape was expected")
    reducer = GradientReducer(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        predivide=gradient_predivide_factor,
        groups=groups_of(groups, num_groups),
        process_set=process_set,
        scale_local=scale_local_gradients,
        prefix="tape",
        what="DistributedGradientTape",
    )
    return distributed(gradtape, _Distributed, reducer)


def PartialDistributedGradientTape(  # noqa: N802
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """As :func:`DistributedGradientTape`; the variables of ``local_layers``, a layer or a list, stay each rank's own.

    Raises:
        ValueError: a layer has no variables yet, because it was not built.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in local_variables(local_layers):
        tape.register_local_source(variable)
    return tape


def local_variables(layers: Any) -> list[Any]:
    """Returns the trainable variables of a layer or a list of layers; None for none.

    Raises:
        ValueError: something is no layer, or a layer with weights was not built yet.
    """
    variables: list[Any] = []
    for layer in [] if layers is None else layers if isinstance(layers, (list, tuple)) else [layers]:
        if not hasattr(layer, "trainable_weights"):
            raise ValueError(f"local_layers has a {type(layer).__name__}, layers were expected")
        if not getattr(layer, "built", True):
            raise ValueError(
                f"local layer {layer.name!r} has no variables yet, a built one was expected; call the model once before"
            )
        variables += layer.trainable_weights
    return variables
