"""Allreduce over two hosts, whose cable carries 1 Gbit/s with a delay of 1 and of 10 ms each way."""

from __future__ import annotations

from benchmarks import lines
from benchmarks.harness import MIN_ROUNDS, Report
from benchmarks.world import MIB

DELAYS_MS = (1, 10)
# A tensor long enough that the delay of a ring's two steps is less than a tenth of it.
NBYTES, FOUR_NBYTES = 64 * MIB, 32 * MIB
CALLS = MIN_ROUNDS
RANK = "benchmarks.hosts_rank"
OURS, FLAT = "sparkvod", "sparkvod, flat ring"


def run(report: Report) -> None:
    """Measures one rank on each host, and two, the latter also as a flat ring."""
    if (why := lines.missing()) is not None:
        report.miss(OURS, why)
        return
    for delay in DELAYS_MS:
        with lines.cable(delay) as names:
            case = f"allreduce {NBYTES // MIB} MiB, 2 hosts with 1 rank, {delay} ms"
            median = report.add(case, {OURS: _seconds(lines.ranks(names, RANK, (NBYTES, CALLS), 1))})
            # Each host sends every byte once, and receives every byte once, at the same time.
            bound = NBYTES / lines.PAYLOAD_BYTES_PER_SECOND
            report.require(f"{case}: part of the bandwidth", bound / median[OURS], at_least=0.9)

            case = f"allreduce {FOUR_NBYTES // MIB} MiB, 2 hosts with 2 ranks, {delay} ms"
            told = {
                name: lines.ranks(names, RANK, (FOUR_NBYTES, CALLS), 2, flat)
                for name, flat in ((OURS, False), (FLAT, True))
            }
            report.notes[case] = {name: ranks[0]["way"] for name, ranks in told.items()}
            median = report.add(case, {name: _seconds(ranks) for name, ranks in told.items()})
            report.require(f"{case}: times as fast as a flat ring", median[FLAT] / median[OURS], at_least=1.2)
    report.notes["cable"] = {"megabits": lines.MEGABITS, "mtu": lines.MTU}


def _seconds(ranks: list[dict[str, list[float]]]) -> list[float]:
    """The slowest rank of each call."""
    return [max(call) for call in zip(*(rank["times"] for rank in ranks), strict=True)]
