"""What backends have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from sparkvod.core import basics, objects
from sparkvod.core.gradients import GradientPlan
from sparkvod.core.ops import check_root, own_set_id
from sparkvod.core.process_sets import ProcessSet


def cond(pred: Any, true_fn: Callable[[], None], false_fn: Callable[[], None], variables: Sequence[Any]) -> None:
    """Calls one of two functions, which assign to some of the variables, where branches may do that."""
    keras.ops.cond(pred, true_fn, false_fn)


def check_variables(variables: Sequence[Any], root_rank: int, process_set: ProcessSet) -> None:
    """Checks what a broadcast of Keras's variables is called with.

    Raises:
        MismatchError: the ranks' variables differ.
        ValueError: the root, or this rank, is none of the set's.
    """
    members = own_set_id(process_set, "broadcast_variables")
    check_root(root_rank, basics.size(), basics.world().ranks_of(members))
    described = [(tuple(v.shape), keras.backend.standardize_dtype(v.dtype)) for v in variables]
    objects.check_variables(described, process_set)


@dataclass
class DenseReducer(GradientPlan):
    """Reduces gradients over the ranks, all as one unit or by groups.

    Attributes:
        collectives: the backend's.
    """

    collectives: Any = None

    def exchange(self, grads: list[Any], places: list[int], variables: Sequence[Any], size: int) -> None:
        """Puts reduced gradients in the places of this rank's own."""
        op, prescale, postscale = self.scales(size)
        for number, group in enumerate(self.units(places, variables, together=True)):
            reduced = self.collectives.grouped_allreduce(
                [keras.ops.stop_gradient(grads[k]) for k in group],
                op=op,
                prescale_factor=prescale,
                postscale_factor=postscale,
                compression=self.compression,
                name=f"keras.gradients.{number}",
                process_set=self.process_set,
            )
            for k, grad in zip(group, reduced, strict=True):
                grads[k] = grad
