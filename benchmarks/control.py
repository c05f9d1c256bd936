"""The control plane: how long up to 256 ranks, threads of one process, take to agree on 100 cached tensors.

All ranks share the cores of this machine, so what is compared is the processor time that each of them needs; on hosts
of their own they would need it at the same time. A rank takes part in ceil(log2 n) rounds.
"""

from __future__ import annotations

import math

from benchmarks import program
from benchmarks.harness import Report

RANKS = (8, 16, 32, 64, 128, 256)
FROM_RANKS = 64  # whose growth is promised
TENSORS, ROUNDS = 100, 5
NEGOTIATIONS = 12_800  # of all ranks of a world together, so that each world is looked at as long


def run(report: Report) -> None:
    """Measures worlds of several sizes in alternating rounds; the tensors have no elements, so no data is moved."""
    native = program.build()
    values: dict[int, list[float]] = {ranks: [] for ranks in RANKS}
    for _ in range(ROUNDS):
        for ranks in [ranks for ranks in RANKS if ranks in values]:
            try:
                told = program.run(native, "negotiate", ranks, TENSORS, NEGOTIATIONS // ranks)
            except RuntimeError as error:
                # Each rank has six while it connects.
                if "Too many open files" not in str(error):
                    raise
                report.miss(f"{ranks} ranks", "more descriptors than this process may have (ulimit -n)")
                del values[ranks]
                continue
            values[ranks].append(told["cpu_seconds_per_rank"])
    cases = {ranks: f"negotiation of {TENSORS} cached tensors, {ranks} ranks" for ranks in values}
    median = {ranks: report.add(cases[ranks], {"sparkvod, per rank": values[ranks]}).popitem()[1] for ranks in values}
    for ranks in values:
        if ranks > FROM_RANKS:
            growth = median[ranks] / median[FROM_RANKS]
            what = f"from {FROM_RANKS} to {ranks} ranks: growth of a rank's time, times that of log n"
            report.require(what, growth / (math.log2(ranks) / math.log2(FROM_RANKS)), at_most=1.1)
