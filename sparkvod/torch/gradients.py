"""Where gradients go between autograd and the optimizer: buckets in engine memory, or a compressor of the user's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from sparkvod import config
from sparkvod._native import Engine
from sparkvod.core import collectives
from sparkvod.core.agreement import Description
from sparkvod.core.compression import described
from sparkvod.core.handles import Pending, abandon_all
from sparkvod.core.ops import CODES, DTYPES, OP_NAMES, Max
from sparkvod.core.reducer import Gradient, Reducer, plan_buckets
from sparkvod.torch import adapter


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced.

    Operation, factors before and after it, compressor, whether sparse become dense, number of the process set.
    """

    op: int
    prescale: float
    postscale: float
    compression: Any
    sparse_as_dense: bool
    process_set: int = 0

    def described(self) -> tuple[tuple[str, str], ...]:
        """Returns names and values of what the ranks must have in common."""
        return (
            ("op", OP_NAMES[self.op]),
            ("factor before the sum (see gradient_predivide_factor=)", repr(self.prescale)),
            ("factor after the sum (see gradient_predivide_factor=)", repr(self.postscale)),
        )


KNOBS = ("bucket_bytes", "first_bucket_bytes")


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

    def keep(self, kept: Kept) -> None:
        """Adds copies of what is kept for the next step."""

    def restore(self, kept: Kept) -> None:
        """Takes what was kept; what it knows nothing of is as in the beginning."""


def check_trained(parameter: torch.nn.Parameter, name: str) -> None:
    """Checks that a parameter's gradient can be reduced.

    Raises:
        ValueError: it has no floating-point elements.
    """
    if not parameter.dtype.is_floating_point:
        raise ValueError(
            f"parameter {name!r} of {parameter.dtype} was found, a real floating-point one was expected; "
            "keep it out of the optimizer that is distributed"
        )


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


class Taken:
    """Gradients that are on their way, as they were when they were taken.

    Whoever changes one then changes nothing that travels, or half of it, on one rank.
    """

    def __init__(self) -> None:
        self._gradients: dict[int, tuple[torch.Tensor, int]] = {}

    def take(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Notes the gradient of a parameter."""
        gradient = parameter.grad
        assert gradient is not None
        self._gradients[index] = gradient, gradient._version

    def restore(self, parameters: Sequence[torch.nn.Parameter]) -> list[int]:
        """Puts replaced gradients back, to take the results, and returns which were replaced or changed."""
        changed = []
        for index, (gradient, version) in self._gradients.items():
            if parameters[index].grad is not gradient or gradient._version != version:
                parameters[index].grad = gradient
                changed.append(index)
        return changed

    def clear(self) -> None:
        """Forgets all."""
        self._gradients.clear()


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
            "synchronize(), while it was being reduced, and was expected to be left alone; call synchronize(), change "
            "gradients (clip, unscale) after it, and step() within 'with optimizer.skip_synchronize():'"
        )


class _KeepsNothing:
    def keep(self, kept: Kept) -> None:
        """Adds nothing."""

    def restore(self, kept: Kept) -> None:
        """Has nothing to take."""


class BucketGradients(_KeepsNothing):
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
        gradients = [
            Gradient(name, parameter.numel(), self._wire(parameter, name))
            for name, parameter in zip(names, parameters, strict=True)
        ]
        plans = plan_buckets(
            gradients,
            prefix=f".from{first}" if first else "",
            groups=groups,
            **{knob: config.get(knob) for knob in KNOBS},
        )
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
        return Description(
            parameters=named(self._parameters, self._names),
            options=(*self._reduction.described(), ("the dtypes that travel (see compression=)", ", ".join(wires))),
            buckets=tuple(tuple(slot.index for slot in plan.slots) for plan in plans),
            knobs=tuple((config.KNOBS[knob].variable, str(config.get(knob))) for knob in KNOBS),
        )

    def release(self, prefix: str) -> None:
        """Lets full buckets be sent."""
        self._reducer.release(prefix)

    def _wire(self, parameter: torch.nn.Parameter, name: str) -> int:
        check_trained(parameter, name)
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


class CompressedGradients(_KeepsNothing):
    """Gradients that a compressor of the user's takes one by one, each reduced under its own name.

    Args:
        parameters: the parameters.
        names: their names.
        reduction: how to reduce.
        first: the number of the optimizer's parameters before these.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        reduction: Reduction,
        first: int = 0,
    ) -> None:
        self._first = first
        self._parameters, self._names = list(parameters), list(names)
        self._reduction = reduction
        self.announce = self.heard = False
        self._prefix: str | None = None
        self._kept: set[int] = set()
        self._started: dict[int, tuple[Pending, Any]] = {}
        started = self._started
        abandon_all(self, lambda: [pending for pending, _ in started.values()])
        self._taken = Taken()

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
        return bool(self._started or self._kept)

    def take(self, index: int) -> None:
        """Compresses a complete gradient and begins its allreduce; before the release that is left to ``reduce``."""
        if self._prefix is None:
            self._kept.add(index)
            self._taken.take(index, self._parameters[index])
            return
        parameter, name, reduction = self._parameters[index], self._names[index], self._reduction
        assert parameter.grad is not None
        compressed, context = reduction.compression.compress(dense(parameter.grad, name, reduction.sparse_as_dense))
        pending = collectives.allreduce(
            adapter,
            compressed,
            f"{self._prefix}.{name}",
            reduction.op,
            reduction.prescale,
            reduction.postscale,
            in_place=True,
            process_set=reduction.process_set,
        )
        self._started[index] = pending, context
        self._taken.take(index, parameter)

    def reduce(self) -> list[str]:
        """Sends zeros for the gradients that are missing, waits, and sets all gradients."""
        self._kept.clear()
        changed = self._taken.restore(self._parameters)
        for index, parameter in enumerate(self._parameters):
            if index not in self._started:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self.take(index)
        self._taken.clear()
        news = self._tell()
        started = dict(self._started)
        self._started.clear()
        error: BaseException | None = None
        for index, (pending, context) in started.items():
            try:
                reduced = self._reduction.compression.decompress(pending.wait(), context)
            except BaseException as e:
                error = error or e
                continue
            gradient = self._parameters[index].grad
            if gradient is not None and gradient.layout is torch.strided:
                adapter.copy_into(gradient, reduced)
            else:
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

    def drain(self) -> None:
        """Waits for what was started and forgets it."""
        self._kept.clear()
        self._taken.clear()
        started = dict(self._started)
        self._started.clear()
        for pending, _ in started.values():
            pending.wait()
