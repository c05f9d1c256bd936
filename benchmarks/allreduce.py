"""Allreduce of float32 beside torch-gloo, 2 and 4 local ranks, both engines in the same processes."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import allreduce_rank
from benchmarks.allreduce_rank import ENGINE_MEMORY, GLOO, MIB, OURS
from benchmarks.harness import MIN_ROUNDS, Report, show

DEADLINE_SECONDS = 600.0
Measured = dict[str, dict[str, list[float]]]


def in_ranks(size: int, rounds: int) -> list[tuple[Measured, float, dict[str, Any]]]:
    """Runs the ranks in processes of their own and returns what each sent, by rank.

    Raises:
        RuntimeError: a rank ended without a result, or the deadline passed.
    """
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe(duplex=False) for _ in range(size)]
    deadline = time.monotonic() + DEADLINE_SECONDS
    with tempfile.TemporaryDirectory(prefix="sparkvod-bench-") as folder:
        meeting = str(Path(folder) / "meeting")
        processes = [
            spawn.Process(target=allreduce_rank.main, args=(rank, size, meeting, rounds, pipes[rank][1]), daemon=True)
            for rank in range(size)
        ]
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                sender.close()
            sent = []
            for rank, (receiver, _) in enumerate(pipes):
                if not receiver.poll(max(0.0, deadline - time.monotonic())):
                    raise RuntimeError(f"rank {rank} of {size} measured nothing within {DEADLINE_SECONDS:g} s")
                try:
                    sent.append(receiver.recv())
                except EOFError:
                    raise RuntimeError(f"rank {rank} of {size} ended before it had measured everything") from None
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            return sent
        finally:
            for process in processes:
                if process.is_alive():
                    process.terminate()


def run(report: Report) -> None:
    """Measures worlds of 2 and of 4 ranks."""
    rounds = MIN_ROUNDS if report.quick else 9
    for size in (2, 4):
        sent = in_ranks(size, rounds)
        measured, _, stats = sent[0]
        for nbytes in allreduce_rank.CALLS:
            what = f"allreduce {show(nbytes, 'B')}, {size} ranks"
            median = report.add(what, measured[str(nbytes)])
            for subject in (OURS, ENGINE_MEMORY):
                if subject in median:
                    promise(report, f"{what}: {subject}", nbytes, size, subject, median[GLOO] / median[subject])
        what = f"{allreduce_rank.SMALL_TENSORS} async tensors of 4 KiB, {size} ranks"
        median = report.add(what, measured["small"])
        report.require(f"{what}: part of gloo's time", median[OURS] / median[GLOO], at_most=0.2 if size == 2 else 1.0)
        report.notes[f"stats of rank 0 of {size}"] = stats
        if size == 2:
            cores = sum(idle for _, idle, _ in sent)
            report.require("idle world of 2 ranks: percent of a core", 100 * cores, at_most=1.0, unit="%")


def promise(report: Report, what: str, nbytes: int, size: int, subject: str, times_as_fast: float) -> None:
    """States what is promised for one size: with 4 ranks on 2 cores, not to be slower than gloo."""
    if nbytes < MIB and size == 2:
        report.require(f"{what}: part of gloo's latency", 1 / times_as_fast, at_most=0.2)
    else:
        bound = 1.0 if size > 2 else 4.0 if subject == ENGINE_MEMORY else 2.5
        report.require(f"{what}: times as fast as gloo", times_as_fast, at_least=bound)
