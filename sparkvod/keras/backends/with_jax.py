"""Keras on JAX, whose compiled steps call the engine back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras

from sparkvod.core.process_sets import ProcessSet
from sparkvod.keras.backends import jax_ops as collectives
from sparkvod.keras.backends.jax_calls import own_errors, tensor_of
from sparkvod.keras.backends.jax_compression import Compression
from sparkvod.keras.backends.shared import DenseReducer, check_variables

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


def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: ProcessSet) -> None:
    """Overwrites Keras's variables with the root's values."""
    check_variables(variables, root_rank, process_set)
    for number, variable in enumerate(variables):
        value = tensor_of(variable)
        # The engine has no unsigned ones of these sizes, of which the states of Keras's random numbers are.
        sent = {"uint32": "int32", "uint64": "int64"}.get(value.dtype.name, value.dtype)
        moved = collectives.broadcast(value.view(sent), root_rank, f"broadcast.variable.{number}", process_set)
        variable.assign(moved.view(value.dtype))


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


def reducer(process_set: ProcessSet, **arguments: Any) -> DenseReducer:
    """Returns what reduces gradients."""
    return DenseReducer(process_set=process_set, collectives=collectives, **arguments)
