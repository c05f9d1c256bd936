"""Gradients in buckets in engine memory, which are reduced where they lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparkvod._native import Engine
from sparkvod.core.agreement import Description
from sparkvod.core.ops import CODES, DTYPES
from sparkvod.core.reducer import Reducer
from sparkvod.torch import adapter, buckets
from sparkvod.torch.gradients import KeepsNothing, Reduction, dense
from sparkvod.torch.in_flight import Owner, Taken
from sparkvod.torch.places import Place


class BucketGradients(KeepsNothing):
    """Gradients as views into buckets.

    A gradient that autograd wrote elsewhere is copied into its bucket once and ``parameter.grad`` becomes the view;
    one that already is the view (accumulated in place after ``zero_grad(set_to_none=False)``) is not copied at all. A
    gradient of another dtype than the wire's, or on another device, stays where it is and is copied there and back.

    Args:
        engine: engine of the world.
        parameters: the parameters.
        names: their names.
        reduction: how to reduce.
        groups: indices of parameters that share a bucket, None to fill buckets by size.
        owner: who asks for the reduction.
        first: the number of the optimizer's parameters before these.
    """

    def __init__(
        self,
        engine: Engine,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        reduction: Reduction,
        groups: Sequence[Sequence[int]] | None,
        owner: Owner,
        first: int = 0,
    ) -> None:
        self._reduction = reduction
        self._parameters, self._names = list(parameters), list(names)
        self._staged: set[int] = set()
        self._taken = Taken(parameters, names, owner)
        plans = buckets.plan(parameters, names, self._code, groups, first)
        scales = reduction.prescale, reduction.postscale
        self._reducer = Reducer(engine, plans, reduction.op, *scales, reduction.process_set)
        cast = reduction.compression.wire is not None
        self._places = [
            Place(parameter, name, *self._reducer.place(index), cast)
            for index, (parameter, name) in enumerate(zip(parameters, names, strict=True))
        ]

    @property
    def announce(self) -> bool:
        """Whether what is sent from now on says that this rank has news."""
        return self._reducer.announce

    @announce.setter
    def announce(self, news: bool) -> None:
        self._reducer.announce = news

    @property
    def heard(self) -> bool:
        """Whether, in the last :meth:`reduce`, any rank had news."""
        return self._reducer.heard

    def description(self) -> Description:
        """Returns what the ranks must have in common."""
        plans = [bucket.plan for bucket in self._reducer.buckets]
        wires = sorted({DTYPES[plan.dtype] for plan in plans})
        wire = ("the dtypes that travel (see compression=)", ", ".join(wires))
        return buckets.description(self._parameters, self._names, (*self._reduction.described(), wire), plans)

    def release(self, prefix: str) -> None:
        """Lets full buckets be sent."""
        self._reducer.release(prefix)

    def _code(self, parameter: torch.nn.Parameter, name: str) -> int:
        wire = self._reduction.compression.wire
        return adapter.dtype_code(parameter.dtype, f"parameter {name!r}") if wire is None else CODES[wire]

    def fits(self) -> bool:
        """Returns whether the parameters still have the dtypes that the buckets were planned for."""
        return all(place.fits for place in self._places)

    @property
    def begun(self) -> bool:
        """Whether a gradient was taken that is not yet reduced."""
        return self._reducer.begun

    def take(self, index: int) -> None:
        """Puts a complete gradient in its bucket; a full bucket's allreduce begins."""
        parameter, place = self._parameters[index], self._places[index]
        assert parameter.grad is not None
        gradient = dense(parameter.grad, self._names[index], self._reduction.sparse_as_dense)
        place.load(gradient)
        if place.is_direct:
            gradient = place.tensor()
        else:
            self._staged.add(index)
        if gradient is not parameter.grad:
            parameter.grad = gradient
        self._taken.take(index)
        self._reducer.ready(index)

    def reduce(self) -> list[str]:
        """Completes all buckets, waits, and sets the gradients; those that no rank had stay None."""
        without = []
        try:
            for index in self._reducer.missing():
                if self._parameters[index].grad is None:
                    self._reducer.absent(index)
                    without.append(index)
                else:
                    self.take(index)
            changed = self._restored()
            self._reducer.wait()
            for index in self._staged:
                gradient = self._parameters[index].grad
                if gradient is None:
                    continue  # refused as changed, below
                adapter.copy_into(gradient, self._places[index].tensor())
            for index in without:
                if self._reducer.had_gradient(index):
                    self._parameters[index].grad = self._received(index)
        finally:
            self._staged.clear()
            self._taken.restore()
            self._reducer.reset()
        return [self._names[index] for index in changed]

    def _restored(self) -> list[int]:
        # Whoever kept a gradient of an earlier step may have changed it, or given it other memory.
        changed = set(self._taken.restore())
        for index, (parameter, place) in enumerate(zip(self._parameters, self._places, strict=True)):
            if parameter.grad is not None and place.is_direct and index not in self._staged:
                view = place.tensor()
                if parameter.grad is not view:
                    parameter.grad = view
                    changed.add(index)
        return sorted(changed)

    def _received(self, index: int) -> torch.Tensor:
        parameter, view = self._parameters[index], self._places[index].tensor()
        if self._places[index].is_direct:
            return view
        return view.to(device=parameter.device, dtype=parameter.dtype, copy=True)

    def give_back(self) -> None:
        """Gives the parameters back the gradients that were on their way, as they are."""
        self._taken.restore()

    def drain(self) -> None:
        """Waits for what was started and forgets it."""
        self._staged.clear()
        self._taken.restore()
        self._reducer.drain()
