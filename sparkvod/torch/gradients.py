"""Gradients between autograd and the optimizer: what all ways to reduce them have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from sparkvod.core import collectives
from sparkvod.core.agreement import Description
from sparkvod.core.handles import Pending
from sparkvod.core.ops import OP_NAMES, Average
from sparkvod.torch import adapter


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced.

    Operation, factors before and after it, compressor, whether sparse become dense, number of the process set and of
    its ranks.
    """

    op: int
    prescale: float
    postscale: float
    compression: Any
    sparse_as_dense: bool
    process_set: int
    ranks: int

    def begin(self, tensor: torch.Tensor, name: str) -> Pending:
        """Begins to reduce a tensor in place, which must not be touched until the result is there."""
        return collectives.allreduce(
            adapter,
            tensor,
            name,
            self.op,
            self.prescale,
            self.postscale,
            in_place=True,
            process_set=self.process_set,
        )

    @property
    def factor(self) -> float:
        """What a plain sum over the ranks must be multiplied by, to be what :meth:`begin` gives."""
        return self.prescale * self.postscale / (self.ranks if self.op == Average else 1)

    def described(self) -> tuple[tuple[str, str], ...]:
        """Returns names and values of what the ranks must have in common."""
        return (
            ("op", OP_NAMES[self.op]),
            ("factor before the sum (see gradient_predivide_factor=)", repr(self.prescale)),
            ("factor after the sum (see gradient_predivide_factor=)", repr(self.postscale)),
        )


@dataclass
class Kept:
    """What lossy compression keeps of the steps before.

    Attributes:
        errors: by parameter's name, what was left out; this rank's own.
        factors: by parameter's name, what the next approximation begins with; equal on all ranks.
        steps: steps made; equal on all ranks.
    """

    errors: dict[str, torch.Tensor] = field(default_factory=dict)
    factors: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: int = 0


class Gradients(Protocol):
    """Takes gradients as they become ready and gives them back reduced, as ``parameter.grad``.

    Attributes:
        announce: whether what is sent from now on says that this rank has news: something to agree on.
    """

    announce: bool

    @property
    def heard(self) -> bool:
        """Whether, in the last :meth:`reduce`, any rank had news."""

    @property
    def begun(self) -> bool:
        """Whether a gradient was taken that is not yet reduced."""

    def fits(self) -> bool:
        """Returns whether the parameters still have the dtypes that were planned for."""

    def description(self) -> Description:
        """Returns what the ranks must have in common."""

    def release(self, prefix: str) -> None:
        """Lets gradients be sent, under names that begin so; before it they are only kept."""

    def take(self, index: int) -> None:
        """Takes the complete gradient of a parameter; it must not be touched until :meth:`reduce`."""

    def reduce(self) -> list[str]:
        """Takes what is missing, waits, sets the parameters' gradients; returns the names of those changed on the way.

        Only after :meth:`release`.
        """

    def drain(self) -> None:
        """Waits for what was started and forgets it."""

    def give_back(self) -> None:
        """Gives the parameters back the gradients that were on their way, as they are."""

    def keep(self, kept: Kept) -> None:
        """Adds copies of what is kept for the next step."""

    def restore(self, kept: Kept) -> None:
        """Takes what was kept; what it knows nothing of is as in the beginning."""


def named(parameters: Sequence[torch.nn.Parameter], names: Sequence[str]) -> Any:
    """Returns names, shapes and dtypes of parameters, as a :class:`Description` holds them."""
    return tuple(
        (name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))
        for name, parameter in zip(names, parameters, strict=True)
    )


def dense(gradient: torch.Tensor, name: str, sparse_as_dense: bool) -> torch.Tensor:
    """Returns a gradient outside autograd's graph and dense.

    Raises:
        ValueError: it is sparse and must not be made dense.
    """
    gradient = gradient.detach() if gradient.requires_grad else gradient
    if gradient.layout is torch.strided:
        return gradient
    if not sparse_as_dense:
        raise ValueError(
            f"a gradient of layout {gradient.layout} was found for {name!r}, a dense one was expected; "
            "pass sparse_as_dense=True to DistributedOptimizer"
        )
    return gradient.to_dense()


def refuse_changed(names: Iterable[str]) -> None:
    """Refuses gradients that were changed on their way.

    Raises:
        ValueError: there are any.
    """
    found = sorted(names)
    if found:
        others = f" and {len(found) - 1} others" if len(found) > 1 else ""
        raise ValueError(
            f"the gradient of {found[0]!r}{others} was changed, replaced or cleared between backward() and step() or "
            "synchronize(), while it was being reduced: call synchronize() first, change gradients (clip, unscale) "
            "after it, and call step() within 'with optimizer.skip_synchronize():'"
        )


class KeepsNothing:
    """What gradients are that keep nothing for the next step."""

    def keep(self, kept: Kept) -> None:
        """Adds nothing."""

    def restore(self, kept: Kept) -> None:
        """Has nothing to take."""
