"""Buckets: gradients that are reduced together, declared once, in engine memory.

A front end that knows its parameters plans buckets over them (:func:`plan_buckets`), lets gradients be views into
the buckets' memory, and tells the :class:`Reducer` which gradients are ready. A bucket whose gradients are all ready
is submitted as one allreduce in place, while others are still being computed. Buckets are submitted in their order,
so that all ranks offer them in the same one; one that was incomplete in the step before does not hold up the others.
Until the ranks have agreed on the buckets (``agreement.py``) the reducer holds everything back.

Behind its gradients a bucket carries one flag per gradient, 1 where the rank had one. After the allreduce a flag
above 0 says that some rank had a gradient, so that a parameter without any keeps none, as in a single process. One
flag more says that a rank has something to agree on, so that all ranks turn to that in the same step.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sparkvod._native import Engine
from sparkvod.core import ops
from sparkvod.core.handles import Pending, abandon, abandon_all, wait_for_all

_ALIGNMENT = 64
# The flags as Python's memoryview sees them: format, and the element that is 1.
_FLAGS: dict[str, tuple[Literal["H", "f", "d"], float]] = {
    "float16": ("H", 0x3C00),
    "bfloat16": ("H", 0x3F80),
    "float32": ("f", 1.0),
    "float64": ("d", 1.0),
}


@dataclass(frozen=True)
class Gradient:
    """What the plan must know of a gradient: its parameter's name, number of elements, code of the wire's dtype."""

    name: str
    count: int
    dtype: int


@dataclass(frozen=True)
class Slot:
    """Where a gradient lies: index of the gradient, first element and number of elements in its bucket."""

    index: int
    offset: int
    count: int


@dataclass(frozen=True)
class BucketPlan:
    """A bucket: its name, code of the dtype, slots, element where the flags begin, number of elements in all.

    There is a flag for each slot and, behind these, the one for news.
    """

    name: str
    dtype: int
    slots: tuple[Slot, ...]
    flags: int
    count: int


def plan_buckets(
    gradients: Sequence[Gradient],
    *,
    prefix: str,
    bucket_bytes: int,
    first_bucket_bytes: int,
    groups: Sequence[Sequence[int]] | None = None,
) -> list[BucketPlan]:
    """Distributes gradients over buckets.

    Args:
        gradients: in the order in which the forward pass uses their parameters, as far as known; buckets are filled
            from the end, because the backward pass goes that way.
        prefix: beginning of the buckets' names, the same on all ranks.
        bucket_bytes: size at which a bucket is full. None but the first takes more than half of what is left, so that
            little is still to be sent when the backward pass ends.
        first_bucket_bytes: the same for the first bucket of each dtype: a small one starts the communication early.
            It is also what the halves end at.
        groups: indices of gradients that belong in one bucket each (in one per dtype, if they have several); what no
            group names gets a bucket of its own. None: by size.

    Returns:
        The buckets, in the order in which they are expected to become ready.
    """
    by_size = groups is None
    members = _by_size(gradients, bucket_bytes, first_bucket_bytes) if by_size else _by_group(gradients, groups or ())
    members.sort(key=lambda indices: -min(indices))
    return [_lay_out(gradients, indices, f"{prefix}.bucket{k}") for k, indices in enumerate(members)]


def _by_size(gradients: Sequence[Gradient], bucket_bytes: int, first_bucket_bytes: int) -> list[list[int]]:
    full: list[list[int]] = []
    filling: dict[int, tuple[list[int], int]] = {}
    limits: dict[int, int] = {}
    sizes = [gradient.count * ops.ITEMSIZES[gradient.dtype] for gradient in gradients]
    left: dict[int, int] = {}  # bytes that are in no full bucket
    for gradient, nbytes in zip(gradients, sizes, strict=True):
        left[gradient.dtype] = left.get(gradient.dtype, 0) + nbytes
    for index in reversed(range(len(gradients))):
        dtype = gradients[index].dtype
        indices, used = filling.get(dtype, ([], 0))
        if indices and used + sizes[index] > limits.get(dtype, first_bucket_bytes):
            full.append(indices)
            left[dtype] -= used
            limits[dtype] = max(min(bucket_bytes, left[dtype] // 2), first_bucket_bytes)
            indices, used = [], 0
        filling[dtype] = ([*indices, index], used + sizes[index])
    return full + [indices for indices, _ in filling.values()]


def _by_group(gradients: Sequence[Gradient], groups: Sequence[Sequence[int]]) -> list[list[int]]:
    grouped = {index for group in groups for index in group}
    alone = [[index] for index in range(len(gradients)) if index not in grouped]
    members: list[list[int]] = []
    for group in [*groups, *alone]:
        by_dtype: dict[int, list[int]] = {}
        for index in group:
            by_dtype.setdefault(gradients[index].dtype, []).append(index)
        members.extend(by_dtype.values())
    return members


def _lay_out(gradients: Sequence[Gradient], indices: Sequence[int], name: str) -> BucketPlan:
    dtype = gradients[indices[0]].dtype
    step = _ALIGNMENT // ops.ITEMSIZES[dtype]
    slots, at = [], 0
    for index in indices:
        slots.append(Slot(index, at, gradients[index].count))
        at += -(-gradients[index].count // step) * step
    first, last = gradients[indices[0]].name, gradients[indices[-1]].name
    members = first if len(indices) == 1 else f"{first}..{last}"
    return BucketPlan(f"{name}[{members}]", dtype, tuple(slots), at, at + len(indices) + 1)


class Bucket:
    """A planned bucket in engine memory.

    Attributes:
        plan: the plan.
        name: the name under which it is reduced.
        memory: the engine memory; slot ``s`` begins at ``s.offset`` elements.
    """

    def __init__(self, engine: Engine, plan: BucketPlan) -> None:
        self.plan = plan
        self.name = plan.name
        self.itemsize = ops.ITEMSIZES[plan.dtype]
        self.memory = engine.allocate(plan.count * self.itemsize)
        flag_format, self._one = _FLAGS[ops.DTYPES[plan.dtype]]
        present = struct.pack(f"{len(plan.slots) + 1}{flag_format}", *([self._one] * len(plan.slots)), 0)
        self._all_present: memoryview[Any] = memoryview(present).cast(flag_format)
        self._flags: memoryview[Any] = memoryview(self.memory).cast("B")[plan.flags * self.itemsize :].cast(flag_format)
        self.absent: list[int] = []
        self.waiting = len(plan.slots)
        self.late = False
        self.pending: Pending | None = None

    def clear(self, position: int) -> None:
        """Writes zeros for a gradient that this rank does not have."""
        slot = self.plan.slots[position]
        ctypes.memset(self.memory.address + slot.offset * self.itemsize, 0, slot.count * self.itemsize)
        self.absent.append(position)

    def write_flags(self, news: bool) -> None:
        """Writes which gradients this rank has, and whether it has news."""
        self._flags[:] = self._all_present
        if news:
            self._flags[-1] = self._one
        for position in self.absent:
            self._flags[position] = 0

    def had_gradient(self, position: int) -> bool:
        """Returns, after the allreduce, whether any rank had the gradient."""
        return self._flags[position] != 0

    def had_news(self) -> bool:
        """Returns, after the allreduce, whether any rank had news."""
        return self._flags[-1] != 0

    def reset(self) -> None:
        """Begins the next step."""
        self.absent.clear()
        self.waiting = len(self.plan.slots)
        if self.pending is not None:  # an interrupt left it behind
            abandon(self.pending)
            self.pending = None


class Reducer:
    """Reduces buckets as their gradients become ready, once :meth:`release` has said that they may.

    Args:
        engine: where the buckets live and are reduced.
        plans: the buckets, in the order of submission.
        op: ``ops.Average`` or ``ops.Sum``.
        prescale: factor for what goes in.
        postscale: factor for what comes out.
        process_set: number of the process set whose ranks reduce.

    Attributes:
        announce: whether buckets that are sent from now on say that this rank has news.
        heard: whether, in the last :meth:`wait`, any rank's did.
    """

    def __init__(
        self,
        engine: Engine,
        plans: Sequence[BucketPlan],
        op: int,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: int = 0,
    ) -> None:
        self._engine, self._op, self._prescale, self._postscale = engine, op, prescale, postscale
        self._process_set = process_set
        self.announce = self.heard = False
        self.buckets = [Bucket(engine, plan) for plan in plans]
        buckets = self.buckets
        abandon_all(self, lambda: [bucket.pending for bucket in buckets if bucket.pending is not None])
        self._places = {
            slot.index: (bucket, position) for bucket in self.buckets for position, slot in enumerate(bucket.plan.slots)
        }
        self._ready: set[int] = set()
        self._first_unsent = 0
        self._prefix: str | None = None
        self._lock = threading.Lock()

    def release(self, prefix: str) -> None:
        """Lets buckets be submitted, at the latest by the next :meth:`wait`; before it, none is.

        Args:
            prefix: put before the buckets' names, the same on all ranks.
        """
        self._prefix = prefix
        for bucket in self.buckets:
            bucket.name = prefix + bucket.plan.name

    def place(self, index: int) -> tuple[Bucket, Slot]:
        """Returns the bucket and the slot of a gradient."""
        bucket, position = self._places[index]
        return bucket, bucket.plan.slots[position]

    @property
    def begun(self) -> bool:
        """Whether a gradient is ready that was not yet reduced."""
        return bool(self._ready)

    def ready(self, index: int) -> None:
        """Says that a gradient lies in its slot, which belongs to the engine until :meth:`wait` has returned."""
        with self._lock:
            bucket, _ = self._places[index]
            self._ready.add(index)
            bucket.waiting -= 1
            if bucket.waiting == 0:
                self._submit(wake=True)

    def missing(self) -> list[int]:
        """Returns the gradients that are not ready: what :meth:`ready` or :meth:`absent` must be called for."""
        missing = []
        for bucket in self.buckets:
            bucket.late = bucket.waiting > 0
            if bucket.late:
                missing += [slot.index for slot in bucket.plan.slots if slot.index not in self._ready]
        return missing

    def absent(self, index: int) -> None:
        """Says that this rank has no such gradient in this step: zeros are sent for it."""
        with self._lock:
            bucket, position = self._places[index]
            self._ready.add(index)
            bucket.clear(position)
            bucket.waiting -= 1

    def wait(self) -> None:
        """Waits until all buckets, each of whose gradients is ready or absent, are reduced.

        Only after :meth:`release`.

        Raises:
            HorovodInternalError: an allreduce failed. The reducer is then as before the step.
        """
        with self._lock:
            self._submit(wake=False)
        self._wait_for_all()
        self.heard = any(bucket.had_news() for bucket in self.buckets)

    def _wait_for_all(self) -> None:
        pending = [bucket.pending for bucket in self.buckets if bucket.pending is not None]
        for bucket in self.buckets:
            bucket.pending = None
        try:
            wait_for_all(pending)
        except BaseException:
            self.reset()
            raise

    def had_gradient(self, index: int) -> bool:
        """Returns, between :meth:`wait` and :meth:`reset`, whether any rank had the gradient."""
        bucket, position = self._places[index]
        return bucket.had_gradient(position)

    def reset(self) -> None:
        """Begins the next step."""
        with self._lock:
            self._ready.clear()
            self._first_unsent = 0
            for bucket in self.buckets:
                bucket.reset()

    def drain(self) -> None:
        """Waits for what was submitted, whatever comes of it, and begins the next step.

        Raises:
            HorovodInternalError: an allreduce failed.
        """
        self._wait_for_all()
        self.reset()

    def _submit(self, wake: bool) -> None:
        if self._prefix is None:
            return
        for number in range(self._first_unsent, len(self.buckets)):
            bucket = self.buckets[number]
            if bucket.pending is not None:
                continue
            if bucket.waiting == 0:
                self._send(bucket, wake)
            elif not bucket.late:
                break
        while self._first_unsent < len(self.buckets) and self.buckets[self._first_unsent].pending is not None:
            self._first_unsent += 1

    def _send(self, bucket: Bucket, wake: bool) -> None:
        bucket.write_flags(self.announce)
        plan, address = bucket.plan, bucket.memory.address
        handle = self._engine.allreduce(
            bucket.name,
            address,
            address,
            plan.count,
            plan.dtype,
            self._op,
            self._prescale,
            self._postscale,
            [plan.count],
            wake,
            self._process_set,
        )
        bucket.pending = Pending(self._engine, handle, None, bucket.memory)
