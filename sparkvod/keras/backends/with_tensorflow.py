"""Keras on TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparkvod.core.process_sets import ProcessSet
from sparkvod.keras.backends.shared import cond
from sparkvod.tensorflow import Compression, functions, own_errors
from sparkvod.tensorflow import normalization as normalization  # registers its layer with Keras, for load_model
from sparkvod.tensorflow import ops as collectives
from sparkvod.tensorflow.gradients import GradientReducer

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


def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: ProcessSet) -> None:
    """Overwrites Keras's variables with the root's values."""
    functions.broadcast_variables(variables, root_rank, process_set)


def reducer(process_set: ProcessSet, **arguments: Any) -> GradientReducer:
    """Returns what reduces gradients."""
    return GradientReducer(process_set=process_set, prefix="keras", **arguments)
