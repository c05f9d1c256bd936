"""A training-like step of 100 tensors, 25 million parameters: how much of its communication hides behind backward."""

from __future__ import annotations

import statistics

from benchmarks import lines
from benchmarks.harness import MIN_ROUNDS, Report, slowest
from benchmarks.step_rank import ALLREDUCE, COMPUTE, STEP, measure
from benchmarks.world import Member, in_ranks

RANK = "benchmarks.step_rank"
DELAY_MS = 1
# Of the allreduce's time is the computation's, over the cable: then backward, two thirds of it, is long enough.
TIMES_ALLREDUCE = 3.0


def body(member: Member) -> dict[str, list[float]]:
    """What a rank does over shared memory."""
    return measure(member.rounds)


def run(report: Report) -> None:
    """Measures two ranks, on one host and on two."""
    case = "25 M parameters in 100 tensors, 2 ranks in shared memory"
    rounds = slowest(in_ranks(body, 2, MIN_ROUNDS if report.quick else 9))
    report.add(case, rounds)
    # Where memory is shared the reduction needs the cores that compute.
    more = [
        (step - compute) / allreduce
        for step, compute, allreduce in zip(rounds[STEP], rounds[COMPUTE], rounds[ALLREDUCE], strict=True)
    ]
    report.require(f"{case}: step less compute, in allreduces", statistics.median(more), at_most=1.1)

    if (why := lines.missing()) is not None:
        report.miss("2 hosts", why)
        return
    # The cable is a process as well. Where the cores compute, it takes from them what a real one would not.
    for where, promised in (("device", True), ("cores", False)):
        case = (
            f"25 M parameters in 100 tensors, 2 hosts, {lines.MEGABITS} Mbit/s, {DELAY_MS} ms, computed by the {where}"
        )
        with lines.cable(DELAY_MS) as names:
            rounds = slowest(lines.ranks(names, RANK, (MIN_ROUNDS, TIMES_ALLREDUCE, where), 1))
        report.add(case, rounds)
        hidden = [
            1 - (step - compute) / allreduce
            for step, compute, allreduce in zip(rounds[STEP], rounds[COMPUTE], rounds[ALLREDUCE], strict=True)
        ]
        if promised:
            report.require(f"{case}: part of the communication that is hidden", statistics.median(hidden), at_least=0.8)
