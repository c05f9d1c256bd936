"""Keras on TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparkvod.core.process_sets import ProcessSet
from sparkvod.tensorflow import Compression, functions, ops
from sparkvod.tensorflow.gradients import GradientReducer

__all__ = ["Compression", "allgather", "allreduce", "broadcast", "broadcast_variables", "reducer", "reducescatter"]

allreduce = ops.allreduce
allgather = ops.allgather
broadcast = ops.broadcast
reducescatter = ops.reducescatter


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Overwrites Keras's variables with the root's values."""
    functions.broadcast_variables(variables, root_rank)


def reducer(process_set: ProcessSet, **arguments: Any) -> GradientReducer:
    """Returns what reduces gradients."""
    return GradientReducer(process_set=process_set, prefix="keras", **arguments)
