"""What the tuner finds, beside the defaults, for two hosts that exchange tensors one by one while they are computed."""

from __future__ import annotations

from benchmarks import lines
from benchmarks.harness import MIN_ROUNDS, Report, show, slowest
from benchmarks.tune_rank import DEFAULT, TUNED

RANK = "benchmarks.tune_rank"
# Tensors of a step, bytes of each, delay of the cable in ms, and what is promised of the speed with the defaults: many
# small ones are better waited for; where the cable is full there is nothing to gain, and nothing must be lost.
CASES = ((200, 2 << 10, 5, 1.1), (100, 16 << 10, 1, 0.95))


def run(report: Report) -> None:
    """Tunes for each case, and measures."""
    if (why := lines.missing()) is not None:
        report.miss("2 hosts", why)
        return
    for tensors, nbytes, delay, promised in CASES:
        case = f"step of {tensors} tensors of {show(nbytes, 'B')}, 2 hosts, {lines.MEGABITS} Mbit/s, {delay} ms"
        with lines.cable(delay) as names:
            told = lines.ranks(names, RANK, (tensors, nbytes, MIN_ROUNDS if report.quick else 7), 1)
        report.add(case, slowest([rank["times"] for rank in told]))
        report.notes[case] = told[0]["found"]
        faster = report.ratio(case, DEFAULT, TUNED)
        report.require(f"{case}: tuned, times as fast as the defaults", faster, at_least=promised)
