"""Keras on PyTorch, which runs eagerly."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from sparkvod.core.process_sets import ProcessSet
from sparkvod.keras.backends import torch_ops as collectives
from sparkvod.keras.backends.shared import DenseReducer, check_variables, cond
from sparkvod.torch import Compression, ops

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
COMPILES = False

#: Errors are sparkvod's own already.
own_errors = nullcontext


def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: ProcessSet) -> None:
    """Overwrites Keras's variables with the root's values."""
    check_variables(variables, root_rank, process_set)
    started = [
        (
            variable,
            ops.broadcast_async(
                collectives.tensor_of(variable).detach(), root_rank, f"broadcast.variable.{number}", process_set
            ),
        )
        for number, variable in enumerate(variables)
    ]
    for variable, handle in started:
        variable.assign(ops.synchronize(handle))


def reducer(process_set: ProcessSet, **arguments: Any) -> DenseReducer:
    """Returns what reduces gradients."""
    return DenseReducer(process_set=process_set, collectives=collectives, **arguments)
