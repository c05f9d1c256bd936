"""Gradients of which only a part travels, bucket by bucket, while what was left out is kept for the next step.

A bucket has a *memory* with a place for each element of its gradients. When all its gradients are there they are added
to the memory; what the bucket then sends is taken out of it again, as it arrives at the others, so that sooner or later
everything does. A gradient that this rank does not have in a step leaves its part of the memory alone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from sparkvod.core.agreement import Description
from sparkvod.core.compression import Lossy, TopK, described
from sparkvod.core.handles import abandon_all
from sparkvod.core.ops import CODES
from sparkvod.core.reducer import BucketPlan
from sparkvod.errors import HorovodInternalError
from sparkvod.torch import adapter, buckets
from sparkvod.torch.gradients import Kept, Reduction, dense
from sparkvod.torch.in_flight import Owner, Taken
from sparkvod.torch.lossy_bucket import LossyBucket
from sparkvod.torch.places import refuse_wider
from sparkvod.torch.powersgd import PowerSGDBucket
from sparkvod.torch.topk import TopKBucket


class LossyGradients:
    """Gradients in lossy buckets.

    They stay where they are and get the result when all have it.

    Args:
        parameters: the parameters.
        names: their names.
        reduction: how to reduce; its compressor is for what is sent.
        lossy: the lossy stage.
        groups: indices of parameters that share a bucket, None to fill buckets by size.
        owner: who asks for the reduction.
        first: the number of the optimizer's parameters before these.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        reduction: Reduction,
        lossy: Lossy,
        groups: Sequence[Sequence[int]] | None,
        owner: Owner,
        first: int = 0,
    ) -> None:
        self.announce = self.heard = False
        self._parameters, self._names = list(parameters), list(names)
        self._reduction, self._lossy = reduction, lossy
        plans = buckets.plan(parameters, names, self._code, groups, first)
        self._buckets = [self._bucket(plan) for plan in plans]
        made = self._buckets
        abandon_all(self, lambda: [bucket.pending for bucket in made if bucket.pending is not None])
        self._places = {slot.index: (bucket, place) for bucket in made for place, slot in enumerate(bucket.plan.slots)}
        self._released = False
        self._ready: set[int] = set()
        self._taken = Taken(parameters, names, owner)
        self._planned = [parameter.dtype for parameter in parameters]
        self._error: HorovodInternalError | None = None
        self._lock = threading.Lock()

    @staticmethod
    def _code(parameter: torch.nn.Parameter, name: str) -> int:
        # Sums of what was left out need more than half precision.
        return CODES["float64" if parameter.dtype is torch.float64 else "float32"]

    def _bucket(self, plan: BucketPlan) -> LossyBucket:
        names = [self._names[slot.index] for slot in plan.slots]
        shapes = [self._parameters[slot.index].shape for slot in plan.slots]
        if isinstance(self._lossy, TopK):
            return TopKBucket(self._lossy, plan, names, shapes, self._reduction)
        return PowerSGDBucket(self._lossy, plan, names, shapes, self._reduction)

    def fits(self) -> bool:
        """Returns whether the parameters still have the dtypes that the buckets were planned for."""
        return all(p.dtype is planned for p, planned in zip(self._parameters, self._planned, strict=True))

    def description(self) -> Description:
        """Returns what the ranks must have in common."""
        compression = f"{self._lossy}, sent by {described(self._reduction.compression)}"
        return buckets.description(
            self._parameters,
            self._names,
            (*self._reduction.described(), ("compression", compression)),
            [bucket.plan for bucket in self._buckets],
        )

    def release(self, prefix: str) -> None:
        """Lets full buckets be sent."""
        self._released = True
        for bucket in self._buckets:
            bucket.name = prefix + bucket.plan.name

    @property
    def begun(self) -> bool:
        """Whether a gradient was taken that is not yet reduced."""
        return bool(self._ready)

    def take(self, index: int) -> None:
        """Notes that a gradient is complete; a bucket that has all of its own is sent."""
        with self._lock:
            bucket, _ = self._places[index]
            if self._parameters[index].dtype is not self._planned[index]:
                refuse_wider(self._parameters[index], self._names[index], self._planned[index], bucket.dtype)
            self._taken.take(index)
            self._ready.add(index)
            bucket.waiting -= 1
            if bucket.waiting == 0 and self._released:
                self._begin(bucket)
                self._go_on()

    def _begin(self, bucket: LossyBucket) -> None:
        with torch.no_grad():
            for place, slot in enumerate(bucket.plan.slots):
                if place not in bucket.absent and slot.count:
                    gradient = self._taken.gradient(slot.index)
                    gradient = dense(gradient, self._names[slot.index], self._reduction.sparse_as_dense)
                    mine = bucket.part(bucket.memory, slot).view(gradient.shape)
                    mine.add_(gradient.to(device=mine.device, dtype=mine.dtype))
            bucket.begun = True
            bucket.begin(self.announce)
        bucket.steps += 1

    def _go_on(self) -> None:
        # A later bucket's gradients are there: what earlier ones have received needs not wait for the end.
        for bucket in self._buckets:
            if bucket.pending is not None and bucket.pending.engine.poll(bucket.pending.handle):
                self._go_on_with(bucket)

    def _go_on_with(self, bucket: LossyBucket) -> None:
        # An error waits for reduce(), and for the other buckets, which the other ranks go on with as well.
        try:
            with torch.no_grad():
                bucket.go_on()
        except HorovodInternalError as error:
            self._error = self._error or error

    def reduce(self) -> list[str]:
        """Completes all buckets, waits, and sets the gradients; those that no rank had stay None."""
        try:
            for index, parameter in enumerate(self._parameters):
                if index not in self._ready and parameter.grad is not None:
                    self.take(index)
            for bucket in self._buckets:
                if not bucket.begun:
                    bucket.absent = {k for k, slot in enumerate(bucket.plan.slots) if slot.index not in self._ready}
                    self._begin(bucket)
            changed = self._taken.restore()
            self._finish()
            for bucket in self._buckets:
                self._give(bucket)
            self.heard = any(bucket.had_news for bucket in self._buckets)
        finally:
            self._forget()
        return [self._names[index] for index in changed]

    def _finish(self) -> None:
        for _ in range(2):  # what an exchange has in its second round then overlaps with the others' first
            for bucket in self._buckets:
                if bucket.pending is not None:
                    self._go_on_with(bucket)
        if self._error is not None:
            raise self._error

    def _give(self, bucket: LossyBucket) -> None:
        for place, slot in enumerate(bucket.plan.slots):
            if not bucket.had_gradient(place):
                continue
            parameter = self._parameters[slot.index]
            values = bucket.part(bucket.result, slot).view(parameter.shape)
            if parameter.grad is not None and parameter.grad.layout is torch.strided:
                adapter.copy_into(parameter.grad, values)
            else:
                parameter.grad = torch.empty_like(parameter).copy_(values)

    def _forget(self) -> None:
        self._error = None
        self._ready.clear()
        self._taken.restore()
        for bucket in self._buckets:
            bucket.reset()

    def give_back(self) -> None:
        """Gives the parameters back the gradients that were on their way, as they are."""
        self._taken.restore()

    def drain(self) -> None:
        """Waits for what was started and forgets it; what it took out of the memories is lost."""
        try:
            self._finish()
        finally:
            self._forget()

    def keep(self, kept: Kept) -> None:
        """Adds what is kept for the next step: copies."""
        for bucket in self._buckets:
            for name, slot, shape in zip(bucket.names, bucket.plan.slots, bucket.shapes, strict=True):
                kept.errors[name] = bucket.part(bucket.memory, slot).view(shape).clone()
            kept.factors.update({name: factor.clone() for name, factor in bucket.factors().items()})
            kept.steps = max(kept.steps, bucket.steps)

    def restore(self, kept: Kept) -> None:
        """Takes what was kept; what it knows nothing of is as in the beginning."""
        for bucket in self._buckets:
            bucket.restore(kept)
