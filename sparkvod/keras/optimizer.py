"""``DistributedOptimizer``: an optimizer of Keras 3 whose gradients are reduced over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from sparkvod.core.gradients import groups_of
from sparkvod.core.ops import Average, reduce_op
from sparkvod.core.process_sets import ProcessSet, global_process_set
from sparkvod.keras import backends
from sparkvod.keras.jit import refuse_jit


class _State:
    """What a distributed optimizer holds beside Keras's own, kept from Keras's tracking: it is not saved.

    Attributes:
        reducer: reduces the gradients.
        cond: the backend's, found before anything is traced.
        passes: gradients that are accumulated locally before their sum is reduced.
        average: whether the sum is divided by ``passes``.
        accumulators: one variable for each trained variable, None before the first gradients.
        counter: how many were accumulated.
        saving: whether the accumulators are left out, because the optimizer is saved or loaded.
    """

    def __init__(self, reducer: Any, cond: Any, passes: int, average: bool) -> None:
        self.reducer, self.cond, self.passes, self.average = reducer, cond, passes, average
        self.accumulators: list[Any] | None = None
        self.counter: Any = None
        self.saving = False

    @contextmanager
    def without_accumulators(self) -> Iterator[None]:
        """Leaves the accumulators out of the optimizer's variables."""
        self.saving = True
        try:
            yield
        finally:
            self.saving = False


class _Distributed:
    """What a distributed optimizer does differently; mixed in before the optimizer's class."""

    _sparkvod: _State

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Reduces the gradients over the ranks, then updates the variables as the wrapped optimizer does.

        Args:
            grads: gradients, in the order of the variables; None where there is none, on all ranks alike.
            trainable_variables: the variables; those that the optimizer was built with when None.
        """
        state = self._sparkvod
        base: Any = super()
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)  # type: ignore[attr-defined]
        grads = list(grads)
        if state.passes == 1:
            base.apply(state.reducer.reduce(grads, variables), variables)
            return
        if not self.built:  # type: ignore[has-type]
            self.build(variables)
            self.built = True
        self._accumulate(grads, variables, base.apply)

    def build(self, variables: Any) -> None:
        """Makes the optimizer's variables, and those in which gradients are accumulated."""
        base: Any = super()
        base.build(variables)
        _make_accumulators(self)

    @property
    def variables(self) -> list[Any]:
        """The optimizer's variables, and behind them those in which gradients are accumulated."""
        base: Any = super()
        state = self._sparkvod
        if state.accumulators is None or state.saving:
            return base.variables
        return [*base.variables, state.counter, *state.accumulators]

    def save_own_variables(self, store: Any) -> None:
        """Saves what the wrapped optimizer would."""
        base: Any = super()
        with self._sparkvod.without_accumulators():
            base.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Loads what the wrapped optimizer would."""
        base: Any = super()
        with self._sparkvod.without_accumulators():
            base.load_own_variables(store)

    def _accumulate(self, grads: list[Any], variables: list[Any], step: Any) -> None:
        state = self._sparkvod
        assert state.accumulators is not None
        there = [k for k, grad in enumerate(grads) if grad is not None]
        index = [self._get_variable_index(variables[k]) for k in there]  # type: ignore[attr-defined]
        sums = [state.accumulators[i] for i in index]
        summed = [keras.ops.add(total, grads[k]) for total, k in zip(sums, there, strict=True)]

        def reduce_and_step() -> None:
            ready: list[Any] = [None] * len(grads)
            for k, total in zip(there, summed, strict=True):
                ready[k] = total / state.passes if state.average else total
            step(state.reducer.reduce(ready, variables), variables)
            for total in sums:
                total.assign(keras.ops.zeros(total.shape, dtype=total.dtype))
            state.counter.assign(0)

        def keep() -> None:
            for total, value in zip(sums, summed, strict=True):
                total.assign(value)
            state.counter.assign_add(1)

        touched = [*variables, *self.variables]
        state.cond(state.counter + 1 >= state.passes, reduce_and_step, keep, touched)

    def register_local_var(self, var: Any) -> None:
        """Says that a variable's gradient is not reduced, and divided by the number of ranks if so asked."""
        self._sparkvod.reducer.register_local(var)


def is_distributed(optimizer: Any) -> bool:
    """Returns whether the optimizer was wrapped."""
    return isinstance(optimizer, _Distributed)


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes an optimizer reduce its gradients over all ranks before each step, and returns it.

    It becomes of a class derived from its own, with the same name, so that models saved with it load without sparkvod,
    and keeps its state. Except on JAX ``model.compile`` then leaves ``jit_compile`` off by itself: XLA cannot hold the
    reduction there.

    Args:
        optimizer: an optimizer of Keras 3, built or not.
        name: a new name for it.
        device_dense: not used.
        device_sparse: not used.
        compression: ``Compression.none`` (the default), ``.fp16``, ``.bf16``, or a class with ``compress`` and
            ``decompress``.
        sparse_as_dense: makes gradients that are ``tf.IndexedSlices`` dense; else they are gathered.
        gradient_predivide_factor: with ``Average``: gradients are divided by it before the sum and by the rest of the
            number of ranks after it.
        op: ``Average`` or ``Sum``.
        backward_passes_per_step: gradients that are summed locally before they are reduced and a step is made.
        average_aggregated_gradients: divides that sum by their number.
        num_groups: deprecated; use ``groups``.
        groups: what is reduced as one unit: a number of groups of consecutive gradients, or lists of variables.
        process_set: the ranks that exchange gradients, by default all; an average is one over these.
        scale_local_gradients: whether gradients of local variables are divided by the number of ranks.

    Raises:
        ValueError: an argument cannot be used; the process set is not registered, or this rank is none of its.
        ImportError: Keras's backend is not supported.
    """
    backend = backends.current()
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            f"a {type(optimizer).__name__} was found, an optimizer of Keras {keras.__version__} was expected, as "
            "keras.optimizers.SGD(0.01)"
        )
    if is_distributed(optimizer):
        raise ValueError("an optimizer that is already distributed was found, a plain one was expected; wrap it once")
    if backward_passes_per_step <= 0:
        raise ValueError(
            f"backward_passes_per_step={backward_passes_per_step} was found, a positive number was expected"
        )
    if backward_passes_per_step > 1 and optimizer.gradient_accumulation_steps:
        raise ValueError(
            f"backward_passes_per_step={backward_passes_per_step} was found with an optimizer that has "
            f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps}, one of them was expected"
        )
    _check_loss_scaling(optimizer)
    reducer = backend.reducer(
        process_set,
        compression=compression or backend.Compression.none,
        sparse_as_dense=sparse_as_dense,
        op=reduce_op(op),
        predivide=gradient_predivide_factor,
        groups=groups_of(groups, num_groups),
        scale_local=scale_local_gradients,
    )
    if not backend.COMPILES:
        refuse_jit()
    base = type(optimizer)
    members = {"__doc__": base.__doc__, "__module__": base.__module__}
    # Past Keras's tracking, which would save it.
    state = _State(reducer, backend.cond, backward_passes_per_step, average_aggregated_gradients)
    object.__setattr__(optimizer, "_sparkvod", state)
    object.__setattr__(optimizer, "__class__", type(base.__name__, (_Distributed, base), members))
    if name is not None:
        optimizer.name = name
    if optimizer.built:
        _make_accumulators(optimizer)
    return optimizer


def _check_loss_scaling(optimizer: Any) -> None:
    scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scaling and keras.backend.backend() == "jax":
        raise ValueError(
            "a LossScaleOptimizer was found, which on JAX steps past what is put around it; another was expected; "
            'train with the dtype policy "mixed_bfloat16", which needs no scaling'
        )
    if not scaling and keras.config.dtype_policy().name == "mixed_float16":
        raise ValueError(
            f"a plain {type(optimizer).__name__} was found with the dtype policy mixed_float16, a LossScaleOptimizer "
            "was expected: Keras would put one around the distributed optimizer, in which a rank alone skips a step; "
            "pass keras.optimizers.LossScaleOptimizer(optimizer)"
        )


def _make_accumulators(optimizer: Any) -> None:
    state = optimizer._sparkvod
    if state.passes == 1 or state.accumulators is not None:
        return
    state.counter = keras.Variable(0, dtype="int32", trainable=False, name="passes")
    # Each with a name of its own, without which Keras saves no HDF5 file.
    state.accumulators = [
        keras.Variable(keras.ops.zeros(v.shape, dtype=v.dtype), dtype=v.dtype, trainable=False, name=f"summed_{number}")
        for number, v in enumerate(optimizer._trainable_variables)
    ]


def PartialDistributedOptimizer(  # noqa: N802
    optimizer: Any, *args: Any, local_layers: Any = None, **arguments: Any
) -> Any:
    """As :func:`DistributedOptimizer`; the variables of ``local_layers``, a layer or a list, stay each rank's own.

    Args:
        optimizer: an optimizer of Keras 3.
        *args: the next arguments of :func:`DistributedOptimizer`.
        local_layers: built layers.
        **arguments: further arguments of it.

    Raises:
        ValueError: a layer was not built, so that it has no variables yet.
    """
    layers = [] if local_layers is None else local_layers
    layers = layers if isinstance(layers, (list, tuple)) else [layers]
    for layer in layers:
        if not layer.built:
            raise ValueError(f"local layer {layer.name!r} was found without variables, a built one was expected")
    distributed = DistributedOptimizer(optimizer, *args, **arguments)
    for layer in layers:
        for variable in layer.trainable_variables:
            distributed.register_local_var(variable)
    return distributed
