"""Gradients that go through a compressor of the user's, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sparkvod.core import collectives
from sparkvod.core.agreement import Description
from sparkvod.core.compression import described
from sparkvod.core.handles import Pending, abandon_all, wait_for_all
from sparkvod.core.ops import Max
from sparkvod.torch import adapter
from sparkvod.torch.gradients import KeepsNothing, Reduction, dense, named
from sparkvod.torch.in_flight import Owner, Taken


class CompressedGradients(KeepsNothing):
    """Gradients that a compressor of the user's takes one by one, each reduced under its own name.

    Args:
        parameters: the parameters.
        names: their names.
        reduction: how to reduce.
        owner: who asks for the reduction.
        first: the number of the optimizer's parameters before these.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        reduction: Reduction,
        owner: Owner,
        first: int = 0,
    ) -> None:
        self._first = first
        self._parameters, self._names = list(parameters), list(names)
        self._reduction = reduction
        self.announce = self.heard = False
        self._prefix: str | None = None
        self._unsent: set[int] = set()
        self._started: dict[int, tuple[Pending, Any]] = {}
        started = self._started
        abandon_all(self, lambda: [pending for pending, _ in started.values()])
        self._taken = Taken(parameters, names, owner)

    def fits(self) -> bool:
        """Returns True: each gradient travels in the dtype that it has."""
        return True

    def description(self) -> Description:
        """Returns what the ranks must have in common."""
        name = described(self._reduction.compression)
        return Description(
            parameters=named(self._parameters, self._names),
            options=(*self._reduction.described(), ("compression", name)),
            buckets=(),
            knobs=(),
        )

    def release(self, prefix: str) -> None:
        """Lets gradients be sent."""
        self._prefix = prefix

    @property
    def begun(self) -> bool:
        """Whether a gradient was taken that is not yet reduced."""
        return bool(self._started or self._unsent)

    def take(self, index: int) -> None:
        """Compresses a complete gradient and begins its allreduce; before the release that is left to ``reduce``."""
        if self._prefix is None:
            self._unsent.add(index)
            self._taken.take(index)
            return
        parameter, name, reduction = self._parameters[index], self._names[index], self._reduction
        assert parameter.grad is not None
        compressed, context = reduction.compression.compress(dense(parameter.grad, name, reduction.sparse_as_dense))
        self._started[index] = reduction.begin(compressed, f"{self._prefix}.{name}"), context
        self._taken.take(index)

    def reduce(self) -> list[str]:
        """Sends zeros for the gradients that are missing, waits, and sets all gradients."""
        self._unsent.clear()
        changed = self._taken.restore()
        for index, parameter in enumerate(self._parameters):
            if index not in self._started:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self.take(index)
        self._taken.restore()
        news = self._tell()
        started = dict(self._started)
        self._started.clear()
        error: BaseException | None = None
        for index, (pending, context) in started.items():
            try:
                reduced = self._reduction.compression.decompress(pending.wait(), context)
            except BaseException as e:  # raised below, when all have ended; of several the first tells the cause
                error = error or e
                continue
            gradient = self._parameters[index].grad
            if gradient is not None and gradient.layout is torch.strided:
                adapter.copy_into(gradient, reduced)
            elif index not in changed:
                self._parameters[index].grad = reduced
        if error is not None:
            news.wait()
            raise error
        self.heard = bool(news.wait().item())
        return [self._names[index] for index in changed]

    def _tell(self) -> Pending:
        # No place for flags is left in what a compressor of the user's makes.
        news, name = torch.tensor([self.announce]), f"{self._prefix}.news{self._first or ''}"
        return collectives.allreduce(adapter, news, name, Max, in_place=True, process_set=self._reduction.process_set)

    def give_back(self) -> None:
        """Gives the parameters back the gradients that were on their way, as they are."""
        self._taken.restore()

    def drain(self) -> None:
        """Waits for what was started and forgets it."""
        self._unsent.clear()
        self._taken.restore()
        started = [pending for pending, _ in self._started.values()]
        self._started.clear()
        wait_for_all(started)
