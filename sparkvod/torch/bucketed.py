"""Gradients in buckets in engine memory, which are reduced where they lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparkvod._native import Engine
from sparkvod.core.agreement import Description
from sparkvod.core.ops import CODES, DTYPES
from sparkvod.core.reducer import Reducer
from sparkvod.torch import adapter, buckets
from sparkvod.torch.gradients import KeepsNothing, Reduction, Taken, dense


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
        first: the number of the optimizer's parameters before these.
    """

    def __init__(
        self,
        engine: Engine,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        reduction: Reduction,
        groups: Sequence[Sequence[int]] | None,
        first: int = 0,
    ) -> None:
        self._reduction = reduction
        self._parameters, self._names = list(parameters), list(names)
        self._staged: set[int] = set()
        self._taken = Taken()
        plans = buckets.plan(parameters, names, self._code, groups, first)
        scales = reduction.prescale, reduction.postscale
        self._reducer = Reducer(engine, plans, reduction.op, *scales, reduction.process_set)
        self._views = [self._view(index) for index in range(len(self._parameters))]

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

    def _view(self, index: int) -> torch.Tensor:
        parameter = self._parameters[index]
        bucket, slot = self._reducer.place(index)
        dtype = adapter.dtype_of(bucket.plan.dtype)
        if slot.count == 0:
            return torch.empty(parameter.shape, dtype=dtype)
        # The parameter's own memory order, so that the optimizer's fused loops find equal strides.
        stride = parameter.stride() if _fills_its_memory(parameter) else None
        return adapter.over(bucket.memory, dtype, slot.offset, parameter.shape, stride)

    @property
    def begun(self) -> bool:
        """Whether a gradient was taken that is not yet reduced."""
        return self._reducer.begun

    def take(self, index: int) -> None:
        """Puts a complete gradient in its bucket; a full bucket's allreduce begins."""
        parameter, view = self._parameters[index], self._views[index]
        if parameter.grad is not view:
            self._load(index, parameter, view)
        self._taken.take(index, parameter)
        self._reducer.ready(index)

    def _load(self, index: int, parameter: torch.nn.Parameter, view: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradient = dense(parameter.grad, self._names[index], self._reduction.sparse_as_dense)
        view.copy_(gradient)
        if self._is_direct(parameter, view):
            parameter.grad = view
        else:
            self._staged.add(index)
            if gradient is not parameter.grad:
                parameter.grad = gradient

    @staticmethod
    def _is_direct(parameter: torch.nn.Parameter, view: torch.Tensor) -> bool:
        return parameter.dtype == view.dtype and parameter.is_cpu

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
            changed = self._taken.restore(self._parameters)
            self._reducer.wait()
            for index in self._staged:
                gradient = self._parameters[index].grad
                assert gradient is not None
                adapter.copy_into(gradient, self._views[index])
            for index in without:
                if self._reducer.had_gradient(index):
                    self._parameters[index].grad = self._received(index)
        finally:
            self._staged.clear()
            self._taken.clear()
            self._reducer.reset()
        return [self._names[index] for index in changed]

    def _received(self, index: int) -> torch.Tensor:
        parameter, view = self._parameters[index], self._views[index]
        if self._is_direct(parameter, view):
            return view
        return view.to(device=parameter.device, dtype=parameter.dtype, copy=True)

    def drain(self) -> None:
        """Waits for what was started and forgets it."""
        self._staged.clear()
        self._taken.clear()
        self._reducer.drain()


def _fills_its_memory(parameter: torch.Tensor) -> bool:
    # True when the strides are a permutation of contiguous ones: no element is skipped or shared.
    expected = 1
    for stride, length in sorted(
        (stride, length) for stride, length in zip(parameter.stride(), parameter.shape, strict=True) if length > 1
    ):
        if stride != expected:
            return False
        expected *= length
    return True
