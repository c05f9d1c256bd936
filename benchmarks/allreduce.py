"""Allreduce on 2, 4 and 8 local ranks beside torch-gloo and Open MPI, and beside what the machine itself allows."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import MIN_ROUNDS, Report, show
from benchmarks.world import ENGINE_MEMORY, GLOO, KIB, MIB, MPI, OURS, Member, in_ranks, peers_of

# Bytes of the tensors, and calls per round, by number of ranks: a round takes about a tenth of a second with gloo.
CALLS = {
    2: {4: 300, 64 * KIB: 50, MIB: 20, 16 * MIB: 4, 64 * MIB: 3},
    4: {4: 100, 64 * KIB: 20, MIB: 10, 16 * MIB: 3, 64 * MIB: 2},
    8: {64 * KIB: 10, MIB: 5, 16 * MIB: 2},
}
LATENCY_BYTES = 4 * KIB  # below this, calls follow each other at once
NATIVE_BYTES = 4 * MIB  # below this, the path without Python is what counts
SMALL_TENSORS, SMALL_BYTES = 200, 4 * KIB
HALVES = ("float16", "bfloat16")
IDLE_SECONDS = 5.0

PATH, PATH_ENGINE_MEMORY = "native path", "native path, engine memory"
LIMIT_IN_PLACE, LIMIT_STAGED = "limit, in place", "limit, staged"
GROUPED = "sparkvod, grouped"


class Subjects:
    """What a rank measures in its own process; each call of a method is made by all ranks in the same order."""

    def __init__(self, member: Member) -> None:
        import torch
        import torch.distributed as dist

        import sparkvod.torch as hvd

        self.member, self.torch, self.hvd = member, torch, hvd
        self.allreduces: dict[str, Callable[[Any], object]] = {
            GLOO: dist.all_reduce,
            OURS: self.ours,
            ENGINE_MEMORY: self.ours,
        }
        self._gloo = dist

    def buffer(self, name: str, nbytes: int, dtype: str = "float32") -> Any:
        """Returns a tensor in the kind of memory that a subject is measured with."""
        kind = getattr(self.torch, dtype)
        count = nbytes // kind.itemsize
        return self.hvd.empty(count, dtype=kind) if name == ENGINE_MEMORY else self.torch.empty(count, dtype=kind)

    def ours(self, tensor: Any) -> None:
        """Sums in place, known by its size and dtype."""
        self.hvd.allreduce_(tensor, name=f"bench.{tensor.nbytes}.{tensor.dtype}", op=self.hvd.Sum)

    def fill(self, *tensors: Any) -> None:
        """Writes whole tensors, as a backward pass does."""
        for tensor in tensors:
            tensor.fill_(self.member.rank + 1)

    def verify(self, name: str, tensor: Any) -> None:
        """Raises unless a sum over the ranks, in place, is exactly right."""
        rank, size = self.member.rank, self.member.size
        pattern = (self.torch.arange(tensor.numel()) % 17).to(tensor.dtype)
        tensor.copy_(pattern + rank)
        self.allreduces[name](tensor)
        wrong = int((tensor != pattern * size + sum(range(size))).sum())
        if wrong:
            raise AssertionError(f"{name}: {wrong} of {tensor.numel()} sums of {tensor.dtype} are wrong on rank {rank}")

    def allreduce(self, name: str, nbytes: int, calls: int, dtype: str = "float32") -> Callable[[], float]:
        """Returns a subject that sums one tensor in place."""
        tensor = self.buffer(name, nbytes, dtype)
        self.verify(name, tensor)
        call = self.allreduces[name]
        if nbytes < LATENCY_BYTES:
            tensor.zero_()  # zeros stay zeros, however often they are summed
            return lambda: self.member.meeting.timed(lambda: call(tensor), calls)
        return lambda: self.member.meeting.timed(lambda: call(tensor), calls, lambda: self.fill(tensor))

    def many(self, name: str, calls: int) -> Callable[[], float]:
        """Returns a subject that sums many small tensors, all started and then all waited for."""
        tensors = [self.buffer(name, SMALL_BYTES) for _ in range(SMALL_TENSORS)]

        def gloo() -> None:
            for work in [self._gloo.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()

        def ours() -> None:
            hvd = self.hvd
            handles = [hvd.allreduce_async_(tensor, name=f"many.{i}", op=hvd.Sum) for i, tensor in enumerate(tensors)]
            for handle in handles:
                hvd.synchronize(handle)

        def grouped() -> None:
            self.hvd.grouped_allreduce_(tensors, name="grouped", op=self.hvd.Sum)

        call = {GLOO: gloo, OURS: ours, GROUPED: grouped}[name]
        self.fill(*tensors)
        call()
        size = self.member.size
        if not all(bool((tensor == size * (size + 1) / 2).all()) for tensor in tensors):
            raise AssertionError(f"{name}: sums of many tensors are wrong")
        return lambda: self.member.meeting.timed(call, calls, lambda: self.fill(*tensors))


def beside(member: Member, nbytes: int, calls: int) -> dict[str, Callable[[], float]]:
    """Returns the native subjects of one size: the machine's limit, and the engine without Python."""
    subjects: dict[str, Callable[[], float]] = {}
    if member.size != 2:
        return subjects
    times = calls * 5 if nbytes < NATIVE_BYTES else calls + 4
    if nbytes < NATIVE_BYTES:
        subjects[PATH] = member.program("path", "ordinary", 2, nbytes, times)
    if nbytes >= LATENCY_BYTES:
        if nbytes < NATIVE_BYTES:
            subjects[PATH_ENGINE_MEMORY] = member.program("path", "engine", 2, nbytes, times)
        subjects[LIMIT_IN_PLACE] = member.program("limit", "in-place", nbytes, times)
        subjects[LIMIT_STAGED] = member.program("limit", "staged", nbytes, times)
    return subjects


def body(member: Member) -> tuple[dict[str, dict[str, list[float]]], float, dict[str, Any]]:
    """What a rank does: returns its measurements, the cores it used while it was idle, and the engine's statistics."""
    from sparkvod.core import basics

    subjects, measured = Subjects(member), {}
    for nbytes, calls in CALLS[member.size].items():
        names = [name for name in subjects.allreduces if nbytes >= LATENCY_BYTES or name != ENGINE_MEMORY]
        chosen = {name: subjects.allreduce(name, nbytes, calls) for name in names}
        chosen |= member.mpi("allreduce", nbytes, calls)
        measured[show(nbytes, "B")] = member.alternate(chosen | beside(member, nbytes, calls))
    if member.size <= 4:
        few = {name: subjects.many(name, 2) for name in (GLOO, OURS, GROUPED)}
        measured["small"] = member.alternate(few | member.mpi("many", SMALL_BYTES, 5))
    if member.size == 2:
        measured["dtypes"] = member.alternate(
            {dtype: subjects.allreduce(OURS, 16 * MIB, 4, dtype) for dtype in ("float32", *HALVES)}
        )
    member.meeting.wait()
    subjects._gloo.barrier()
    subjects._gloo.destroy_process_group()
    time.sleep(0.5)
    return measured, idle_cores(IDLE_SECONDS) if member.size == 2 else 0.0, basics.engine().stats()


def idle_cores(seconds: float) -> float:
    """Sleeps, and returns how many cores this process used meanwhile, with all its threads."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(seconds)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / seconds


def run(report: Report) -> None:
    """Measures worlds of 2, 4 and 8 ranks."""
    peers = peers_of(report)
    for size, sizes in CALLS.items():
        sent = in_ranks(body, size, MIN_ROUNDS if report.quick or size > 4 else 7)
        measured, _, stats = sent[0]
        for nbytes in sizes:
            case = f"allreduce {show(nbytes, 'B')}, {size} ranks"
            report.add(case, measured[show(nbytes, "B")])
            if size == 2:
                promise_two(report, case, nbytes, peers)
            else:
                faster_than_peers(report, case, OURS, peers)
        if "small" in measured:
            small(report, f"{SMALL_TENSORS} async tensors of 4 KiB, {size} ranks", measured["small"], size)
        report.notes[f"stats of rank 0 of {size}"] = stats
        if size == 2:
            case = "allreduce 16 MiB by dtype, 2 ranks"
            report.add(case, measured["dtypes"])
            for dtype in HALVES:
                # Equal, when memory is the limit; a twentieth is the noise of the rounds.
                what = f"{case}: bytes/s of {dtype}, times float32's"
                report.require(what, report.ratio(case, "float32", dtype), at_least=0.95)
            cores = sum(idle for _, idle, _ in sent)
            report.require("idle world of 2 ranks: percent of a core", 100 * cores, at_most=1.0, unit="%")


def faster_than_peers(report: Report, case: str, subject: str, peers: list[str], times: float = 1.0) -> None:
    """Promises that a subject is faster than each peer, ``times`` as fast as the best."""
    for peer in peers:
        report.require(f"{case}: {subject}, times as fast as {peer}", report.ratio(case, peer, subject), at_least=times)


def promise_two(report: Report, case: str, nbytes: int, peers: list[str]) -> None:
    """States what is promised for one size on two ranks."""
    median = {figure.subject: figure.median for figure in report.figures if figure.case == case}
    if nbytes < LATENCY_BYTES:
        report.require(f"{case}: from Python", median[OURS], at_most=40e-6, unit="s")
        report.require(f"{case}: part of gloo's latency", report.ratio(case, OURS, GLOO), at_most=0.2)
        if MPI in peers:
            what = f"{case}: {PATH}, part of {MPI}'s latency"
            report.require(what, report.ratio(case, PATH, MPI), at_most=3.0)
        return
    native = nbytes < NATIVE_BYTES
    ordinary, engine_memory = (PATH, PATH_ENGINE_MEMORY) if native else (OURS, ENGINE_MEMORY)
    for subject, limit, part in ((engine_memory, LIMIT_IN_PLACE, 0.7), (ordinary, LIMIT_STAGED, 0.6)):
        report.require(f"{case}: {subject}, part of the {limit}", report.ratio(case, limit, subject), at_least=part)
    faster_than_peers(report, case, ordinary, peers, 2.5 if nbytes == 64 * MIB else 1.0)
    if native:
        for python, path in ((OURS, PATH), (ENGINE_MEMORY, PATH_ENGINE_MEMORY)):
            report.require(
                f"{case}: {python}, more than {path}", median[python] - median[path], at_most=40e-6, unit="s"
            )
    if nbytes == 16 * MIB:
        faster_than_peers(report, case, ENGINE_MEMORY, [GLOO], 6.0)
    if nbytes >= 16 * MIB and MPI in peers:
        faster_than_peers(report, case, ENGINE_MEMORY, [MPI], 1.8 if nbytes == 16 * MIB else 3.0)


def small(report: Report, case: str, measured: dict[str, list[float]], size: int) -> None:
    """States what is promised for many small tensors."""
    median = report.add(case, measured)
    report.require(f"{case}: part of gloo's time", report.ratio(case, OURS, GLOO), at_most=0.2 if size == 2 else 1.0)
    if size == 2:
        report.require(f"{case}: all of them", median[OURS], at_most=1.3e-3, unit="s")
    if MPI in median:
        report.require(f"{case}: times as fast as {MPI}", report.ratio(case, MPI, OURS), at_least=1.0)
