"""Keras on PyTorch, which runs eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import keras

from sparkvod.core import basics
from sparkvod.core.gradients import GradientPlan
from sparkvod.core.ops import check_root, set_id
from sparkvod.core.process_sets import ProcessSet
from sparkvod.keras.backends import torch_ops
from sparkvod.keras.backends import torch_ops as collectives
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


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Overwrites Keras's variables with the root's values."""
    check_root(root_rank, basics.size())
    started = [
        (
            variable,
            ops.broadcast_async(torch_ops.tensor_of(variable).detach(), root_rank, f"broadcast.variable.{number}"),
        )
        for number, variable in enumerate(variables)
    ]
    for variable, handle in started:
        variable.assign(ops.synchronize(handle))


def cond(pred: Any, true_fn: Callable[[], None], false_fn: Callable[[], None], variables: Sequence[Any]) -> None:
    """Calls one of two functions, which assign to some of the variables."""
    keras.ops.cond(pred, true_fn, false_fn)


class _Reducer(GradientPlan):
    """Reduces gradients over the ranks, all as one unit or by groups."""

    def __post_init__(self) -> None:
        set_id(self.process_set)
        super().__post_init__()

    def reduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the gradients, those of local variables scaled, the others reduced; None stays None."""
        size = len(basics.world().ranks_of(set_id(self.process_set)))
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
            pairs = [self.compression.compress(results[k].detach()) for k in group]
            reduced = ops.grouped_allreduce(
                [tensor for tensor, _ in pairs],
                op=op,
                prescale_factor=prescale,
                postscale_factor=postscale,
                name=f"keras.gradients.{number}",
                process_set=self.process_set,
            )
            for k, tensor, (_, context) in zip(group, reduced, pairs, strict=True):
                results[k] = self.compression.decompress(tensor, context)
        return results


def reducer(process_set: ProcessSet, **arguments: Any) -> _Reducer:
    """Returns what reduces gradients."""
    return _Reducer(process_set=process_set, **arguments)
