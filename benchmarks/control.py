"""The control plane: how long up to 256 ranks, threads of one process, take to agree on 100 cached tensors.

All ranks share the cores of this machine, so what is compared is the processor time that each of them needs; on hosts
of their own they would need it at the same time. There are 256 threads whatever the size of a world, in as many worlds
at once as they make up, so that caches and scheduler have the same to do. A rank takes part in ceil(log2 n) rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from benchmarks import program
from benchmarks.harness import Report

RANKS = (8, 16, 32, 64, 128, 256)
THREADS = RANKS[-1]
TENSORS, CALLS, ROUNDS = 100, 20, 5


def run(report: Report) -> None:
    """Measures worlds of several sizes in alternating rounds; the tensors have no elements, so no data is moved."""
    native = program.build()
    values: dict[int, list[float]] = {ranks: [] for ranks in RANKS}
    for _ in range(ROUNDS):
        for ranks in RANKS:
            try:
                told = program.run(native, "negotiate", ranks, THREADS // ranks, TENSORS, CALLS)
            except RuntimeError as error:
                # Each thread has six while it connects.
                if "Too many open files" not in str(error):
                    raise
                report.miss(f"{THREADS} threads", "more descriptors than this process may have (ulimit -n)")
                return
            values[ranks].append(told["cpu_seconds_per_rank"])
    for ranks in RANKS:
        report.add(f"negotiation of {TENSORS} cached tensors, {ranks} ranks", {"sparkvod, per rank": values[ranks]})
    what = f"negotiation, from {RANKS[0]} to {RANKS[-1]} ranks: growth, as a power of log n"
    report.require(what, growth(values), at_most=1.1)


def growth(values: Mapping[int, Sequence[float]]) -> float:
    """Returns the power of log2 n by which times grow: the slope of a line through all of them, both in logarithms."""
    points = [(math.log(math.log2(ranks)), math.log(time)) for ranks, times in values.items() for time in times]
    return statistics.linear_regression(*zip(*points, strict=True)).slope
