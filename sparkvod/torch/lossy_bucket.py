"""What a lossy bucket is: gradients that share a memory of what was left out, and an exchange in one round or two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from sparkvod.core.handles import Pending, abandon
from sparkvod.core.reducer import BucketPlan, Slot
from sparkvod.torch import adapter
from sparkvod.torch.gradients import Kept, Reduction


class LossyBucket(ABC):
    """A bucket: its memory, and the exchange of one step after the other.

    Args:
        plan: where its gradients lie.
        names: names of its gradients' parameters, in the order of the slots.
        shapes: their shapes.
        reduction: how to reduce; its compressor is for what is sent.

    Attributes:
        memory: what is to be sent, ``plan.flags`` elements.
        result: the reduced gradients, in the same places.
        steps: steps begun.
        waiting: gradients that are not there yet, in this step.
        absent: places of those that this rank does not have.
    """

    def __init__(
        self,
        plan: BucketPlan,
        names: Sequence[str],
        shapes: Sequence[torch.Size],
        reduction: Reduction,
    ) -> None:
        self.plan, self.names, self.shapes, self.reduction = plan, names, shapes, reduction
        self.name = plan.name
        self.dtype = adapter.dtype_of(plan.dtype)
        self.memory = torch.zeros(plan.flags, dtype=self.dtype)
        self.result = torch.zeros(plan.flags, dtype=self.dtype)
        self.steps = 0
        self.pending: Pending | None = None
        self._flags = torch.zeros(0, dtype=torch.bool)
        self.reset()

    def reset(self) -> None:
        """Begins the next step."""
        self.waiting = len(self.plan.slots)
        self.absent: set[int] = set()
        self.begun = False
        if self.pending is not None:
            abandon(self.pending)
            self.pending = None

    def part(self, of: torch.Tensor, slot: Slot) -> torch.Tensor:
        """Returns the elements of a gradient in the memory or the result."""
        return of[slot.offset : slot.offset + slot.count]

    def flags(self, news: bool) -> torch.Tensor:
        """Returns which gradients this rank has, and behind them whether it has news."""
        return torch.tensor([*(place not in self.absent for place in range(len(self.plan.slots))), news])

    def told(self, flags: torch.Tensor) -> None:
        """Takes the flags of all ranks, whether any has set them."""
        self._flags = flags

    def had_gradient(self, place: int) -> bool:
        """Returns, after the exchange, whether any rank had the gradient."""
        return bool(self._flags[place])

    @property
    def had_news(self) -> bool:
        """Whether, after the exchange, any rank had news."""
        return bool(self._flags[-1])

    @abstractmethod
    def begin(self, news: bool) -> None:
        """Starts the exchange of the memory, into which the gradients were added, and takes out what is sent."""

    @abstractmethod
    def go_on(self) -> None:
        """Takes what :attr:`pending` has brought; it is None then, or what the result is still waiting for."""

    def factors(self) -> dict[str, torch.Tensor]:
        """Returns what the next step begins with, by name."""
        return {}

    def restore(self, kept: Kept) -> None:
        """Takes what another bucket kept; what it knows nothing of is as in the beginning."""
        self.steps = kept.steps
        for name, slot in zip(self.names, self.plan.slots, strict=True):
            error = kept.errors.get(name)
            if error is not None and error.numel() == slot.count:
                self.part(self.memory, slot).copy_(error.reshape(-1))
            else:
                self.part(self.memory, slot).zero_()


def forget_what_is_not_finite(memory: torch.Tensor) -> None:
    """Sets to zero what would be in the way of every later step: a gradient that overflowed is told of once."""
    memory.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
