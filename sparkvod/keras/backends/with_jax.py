"""Keras on JAX, whose compiled steps call the engine back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras

from sparkvod.core import basics
from sparkvod.core.gradients import GradientPlan
from sparkvod.core.ops import set_id
from sparkvod.core.process_sets import ProcessSet
from sparkvod.keras.backends import jax_ops as collectives
from sparkvod.keras.backends.jax_ops import Compression, own_errors

__all__ = [
    "COMPILES",
    "Compression",
    "broadcast_variables",
    "collectives",
    "cond",
    "own_errors",
    "reducer",
]

#: Whether a compiled step can hold a collective.
COMPILES = True


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Overwrites Keras's variables with the root's values."""
    for number, variable in enumerate(variables):
        variable.assign(collectives.broadcast(variable, root_rank, f"broadcast.variable.{number}"))


def cond(pred: Any, true_fn: Callable[[], None], false_fn: Callable[[], None], variables: Sequence[Any]) -> None:
    """Calls one of two functions, which assign to some of the variables.

    JAX's branches may only return values, so each runs in a scope that catches what it assigns.
    """

    def caught(function: Callable[[], None], values: Sequence[Any]) -> list[Any]:
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))) as scope:
            function()
        return [scope.get_current_value(variable) for variable in variables]

    before = [variable.value for variable in variables]
    after = jax.lax.cond(pred, lambda v: caught(true_fn, v), lambda v: caught(false_fn, v), before)
    for variable, value in zip(variables, after, strict=True):
        variable.assign(value)


class _Reducer(GradientPlan):
    """Reduces gradients over the ranks, all as one unit or by groups."""

    def __post_init__(self) -> None:
        set_id(self.process_set)
        super().__post_init__()

    def reduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the gradients, those of local variables scaled, the others reduced; None stays None."""
        members = set_id(self.process_set)
        size = len(basics.world().ranks_of(members))
        results = list(grads)
        places = []
        for k, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
            if grad is None:
                continue
            if self.is_local(variable):
                results[k] = grad / size if self.scale_local else grad
            else:
                places.append(k)
        if size == 1 or not self.process_set.included():
            return results
        op, prescale, postscale = self.scales(size)
        for number, group in enumerate(self.units(places, variables, together=True)):
            pairs = [self.compression.compress(results[k]) for k in group]
            reduced = collectives.reduced(
                [tensor for tensor, _ in pairs], f"keras.gradients.{number}", op, prescale, postscale, members
            )
            for k, tensor, (_, context) in zip(group, reduced, pairs, strict=True):
                results[k] = self.compression.decompress(tensor, context)
        return results


def reducer(process_set: ProcessSet, **arguments: Any) -> _Reducer:
    """Returns what reduces gradients."""
    return _Reducer(process_set=process_set, **arguments)
