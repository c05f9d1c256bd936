"""What every reduction of a list of gradients is told, whatever the framework; and which of them go as one unit."""

from __future__ import annotations

import math
import numbers
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkvod.core import basics, ops
from sparkvod.core.compression import check_compressor
from sparkvod.core.process_sets import ProcessSet, global_process_set


def check_predivide(factor: Any, op: int) -> None:
    """Checks a ``gradient_predivide_factor``.

    Raises:
        ValueError: it is no positive number, or goes with another op than ``Average``.
    """
    if factor != 1.0 and op != ops.Average:
        raise ValueError(
            f"gradient_predivide_factor={factor} was found with op=Sum, it was expected with op=Average only; "
            "leave it out"
        )
    is_number = isinstance(factor, numbers.Real) and not isinstance(factor, bool)
    if not is_number or not 0 < factor < math.inf:
        raise ValueError(f"gradient_predivide_factor={factor} was found, a positive one was expected")


def scales(op: int, predivide: float, size: int) -> tuple[int, float, float]:
    """Returns (op, prescale, postscale) of the allreduce that reduces gradients among ``size`` ranks.

    An average with a ``predivide`` is a sum that divides by it before, and by the rest of the number of ranks after.
    """
    return (op, 1.0, 1.0) if predivide == 1.0 else (ops.Sum, 1.0 / predivide, predivide / size)


def groups_of(groups: Any, num_groups: int, what: str = "variables") -> Any:
    """Returns the ``groups`` argument that two arguments ask for; ``num_groups`` is the deprecated one.

    ``what`` is what the framework calls the members of its groups.

    Raises:
        ValueError: it is neither a number nor a list of lists.
    """
    if num_groups:
        warnings.warn("num_groups= is deprecated, use groups=", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0):
        return groups or None
    if isinstance(groups, (list, tuple)) and all(isinstance(group, (list, tuple)) for group in groups):
        return [list(group) for group in groups]
    raise ValueError(f"groups={groups!r} was found, a number of groups or lists of {what} were expected")


def chunks(number: int, items: Sequence[int]) -> list[list[int]]:
    """Returns the items in ``number`` consecutive parts of equal length, or one more; no part is empty."""
    number = max(min(number, len(items)), 1)
    bounds = [len(items) * n // number for n in range(number + 1)]
    return [list(items[first:end]) for first, end in zip(bounds, bounds[1:], strict=False) if end > first]


@dataclass
class GradientPlan(ABC):
    """How gradients are reduced over the ranks; a framework adds :meth:`exchange`.

    Attributes:
        compression: what dense gradients are sent as: a compressor.
        sparse_as_dense: whether sparse gradients are made dense before.
        op: ``Average`` or ``Sum``.
        predivide: gradient_predivide_factor, with ``Average``.
        groups: None, a number of groups, or lists of variables.
        process_set: among which ranks, of which this is one.
        scale_local: whether gradients of local variables are divided by the number of ranks.
        what: what asks for the reduction, for messages.
    """

    compression: Any
    sparse_as_dense: bool = False
    op: int = ops.Average
    predivide: float = 1.0
    groups: Any = None
    process_set: ProcessSet = global_process_set
    scale_local: bool = True
    what: str = "DistributedOptimizer"
    _local: set[Any] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        ops.own_set_id(self.process_set, self.what)
        self.op = ops.reduce_op(self.op)
        check_compressor(self.compression)
        check_predivide(self.predivide, self.op)
        seen: set[Any] = set()
        for variable in [] if self.groups is None or isinstance(self.groups, int) else sum(self.groups, []):
            if not hasattr(variable, "shape"):
                raise ValueError(f"a {type(variable).__name__} was found in groups, variables were expected")
            if self.key(variable) in seen:
                raise ValueError(
                    f"a variable of shape {tuple(variable.shape)} was found twice in groups, once was expected"
                )
            seen.add(self.key(variable))

    def key(self, variable: Any) -> Any:
        """Returns what tells a variable from others."""
        return id(variable)

    def register_local(self, variable: Any) -> None:
        """Says that a variable's gradient is this rank's own business."""
        self._local.add(self.key(variable))

    def is_local(self, variable: Any) -> bool:
        """Returns whether the variable was registered as local."""
        return bool(self._local) and self.key(variable) in self._local

    def reduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the gradients, those of local variables scaled, the others reduced; None stays None.

        Args:
            grads: gradients or None, one for each variable. The ranks must have None in the same places.
            variables: what they are the gradients of.

        Raises:
            HorovodInternalError: an eager reduction failed.
            ValueError: the process set is not registered in this world, or this rank is none of its.
        """
        # Again, since the world may be another one than when this was made.
        size = len(basics.world().ranks_of(ops.own_set_id(self.process_set, self.what)))
        results = list(grads)
        places = []
        for k, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
            if grad is None:
                continue
            if not self.is_local(variable):
                places.append(k)
            elif self.scale_local:
                results[k] = self.divided(grad, size)
        if size > 1:
            self.exchange(results, places, variables, size)
        return results

    def divided(self, grad: Any, size: int) -> Any:
        """Returns a gradient divided by the number of ranks."""
        return grad / size

    @abstractmethod
    def exchange(self, grads: list[Any], places: list[int], variables: Sequence[Any], size: int) -> None:
        """Puts reduced gradients in the places of this rank's own.

        Args:
            grads: all gradients.
            places: of those that are reduced.
            variables: what they are the gradients of.
            size: number of the ranks that reduce them, more than one.
        """

    def scales(self, size: int) -> tuple[int, float, float]:
        """As :func:`scales`."""
        return scales(self.op, self.predivide, size)

    def units(self, places: list[int], variables: Sequence[Any], together: bool) -> list[list[int]]:
        """Returns which gradients are reduced as one unit.

        Args:
            places: of the gradients that are reduced, in ``variables``.
            variables: what they are the gradients of.
            together: whether all are one unit where no groups are asked for; else each is one.
        """
        if not places:
            return []
        if self.groups is None:
            return [places] if together else [[k] for k in places]
        if isinstance(self.groups, int):
            return chunks(self.groups, places)
        group_of = {self.key(variable): n for n, group in enumerate(self.groups) for variable in group}
        units: dict[Any, list[int]] = {}
        for k in places:
            units.setdefault(group_of.get(self.key(variables[k]), ("alone", k)), []).append(k)
        return list(units.values())
