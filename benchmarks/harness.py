"""What all benches share: alternating rounds, medians with their spread, the machine's description, one table, JSON.

A bench is a module of this package with ``run(report)``. It verifies its results before it times anything, times
itself and its peer in alternating rounds (:func:`alternate`: the machine changes its state within seconds, and then
does so under both), and states what is promised with :meth:`Report.require`.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

MIN_ROUNDS = 5
_SCALES = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")),
    "B": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")),
}


def quantile(values: Sequence[float], q: float) -> float:
    """Returns the nearest-rank quantile ``q`` (0 to 1) of ``values``."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def alternate(subjects: Mapping[str, Callable[[], float]], rounds: int = MIN_ROUNDS) -> dict[str, list[float]]:
    """Calls every subject once per round, every other round in reverse order.

    Args:
        subjects: by name, what measures itself once and returns the measured value.
        rounds: how often, at least :data:`MIN_ROUNDS`.

    Returns:
        The values of each subject, in the order of the rounds.
    """
    if rounds < MIN_ROUNDS:
        raise ValueError(f"{rounds} rounds were asked for, at least {MIN_ROUNDS} were expected")
    values: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(rounds):
        for name in list(subjects) if number % 2 == 0 else reversed(list(subjects)):
            values[name].append(float(subjects[name]()))
    return values


def slowest(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Returns the slowest rank's time of each round, by subject.

    Args:
        ranks: by rank, the seconds of each round, by subject; all have the same.
    """
    return {name: [max(times) for times in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}


def machine() -> dict[str, Any]:
    """Returns a description of the machine and of the versions that matter, for the JSON."""
    cpu = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    memory = next((int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    versions = {}
    for package in ("sparkvod", "torch", "pyspark", "pyarrow", "numpy", "tensorflow-cpu", "keras", "openmpi", "mpi4py"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "cpu": cpu or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
        "load": os.getloadavg(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def show(value: float, unit: str) -> str:
    """Returns a value with three significant digits and a unit of fitting size."""
    for size, name in _SCALES.get(unit, ()):
        if abs(value) >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:,.0f} {unit}".rstrip() if abs(value) >= 1000 else f"{value:.3g} {unit}".rstrip()


@dataclass(frozen=True)
class Figure:
    """Repeated measurements of one subject in one case.

    Attributes:
        case: what was measured, for example ``"allreduce 1 MiB, 2 ranks"``.
        subject: who was measured, for example ``"sparkvod"``.
        unit: ``"s"``, ``"B"``, ``"rows/s"``, …
        values: one per round.
    """

    case: str
    subject: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.values)


@dataclass(frozen=True)
class Promise:
    """A stated bound, the value found, and whether it holds."""

    what: str
    found: float
    bound: float
    at_least: bool
    unit: str

    @property
    def held(self) -> bool:
        """True when the value is within its bound."""
        return self.found >= self.bound if self.at_least else self.found <= self.bound


class Report:
    """Collects the figures and promises of one bench.

    Args:
        name: name of the bench, also of the JSON file.
        quick: a bench may measure less, to see that it runs; its promises still count.
    """

    def __init__(self, name: str, quick: bool = False) -> None:
        self.name = name
        self.quick = quick
        self.figures: list[Figure] = []
        self.promises: list[Promise] = []
        self.absent: list[tuple[str, str]] = []
        self.notes: dict[str, Any] = {}

    def add(self, case: str, values: Mapping[str, Sequence[float]], unit: str = "s") -> dict[str, float]:
        """Records the rounds of each subject and returns their medians by subject."""
        figures = [Figure(case, subject, unit, tuple(rounds)) for subject, rounds in values.items()]
        self.figures += figures
        return {figure.subject: figure.median for figure in figures}

    def ratio(self, case: str, over: str, under: str) -> float:
        """Returns the median over the rounds of a case of one subject's value divided by another's.

        What the machine does to a whole round it does to both, so this is steadier than the ratio of the medians.
        """
        values = {figure.subject: figure.values for figure in self.figures if figure.case == case}
        return statistics.median(a / b for a, b in zip(values[over], values[under], strict=True))

    def miss(self, subject: str, why: str) -> None:
        """Records that a subject could not be measured in this bench, and why; its row says so."""
        self.absent.append((subject, why))

    def require(
        self, what: str, found: float, *, at_least: float | None = None, at_most: float | None = None, unit: str = ""
    ) -> None:
        """States a promise: a ratio or a value with its lower or its upper bound.

        Args:
            what: what is promised, for example ``"1 MiB, times as fast as gloo"``.
            found: the value measured.
            at_least: lower bound; exactly one of the two bounds is given.
            at_most: upper bound.
            unit: unit of the value, empty for a ratio.
        """
        if (at_least is None) == (at_most is None):
            raise ValueError(f"exactly one of at_least and at_most was expected for {what!r}")
        bound = at_least if at_least is not None else at_most
        assert bound is not None
        self.promises.append(Promise(what, found, bound, at_least is not None, unit))

    @property
    def held(self) -> bool:
        """True when every promise holds."""
        return all(promise.held for promise in self.promises)

    def table(self) -> str:
        """Returns the figures and promises as text."""
        lines = [f"== {self.name}"]
        rows = [("measured", "by", "median", "p10 to p90", "rounds")]
        rows += [
            (
                figure.case,
                figure.subject,
                show(figure.median, figure.unit),
                " to ".join(show(quantile(figure.values, q), figure.unit) for q in (0.1, 0.9)),
                str(len(figure.values)),
            )
            for figure in self.figures
        ]
        rows += [("", subject, why, "", "0") for subject, why in self.absent]
        lines += _columns(rows)
        rows = [("promised", "bound", "found", "")]
        rows += [
            (
                promise.what,
                ("≥ " if promise.at_least else "≤ ") + show(promise.bound, promise.unit),
                show(promise.found, promise.unit),
                "held" if promise.held else "MISSED",
            )
            for promise in self.promises
        ]
        return "\n".join(lines + [""] + _columns(rows))

    def write(self, folder: Path) -> Path:
        """Writes ``<name>.json`` into ``folder`` and returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        figures = [
            {**asdict(f), "median": f.median, "p10": quantile(f.values, 0.1), "p90": quantile(f.values, 0.9)}
            for f in self.figures
        ]
        promises = [{**asdict(p), "held": p.held} for p in self.promises]
        content = {
            "bench": self.name,
            "machine": machine(),
            "notes": self.notes,
            "absent": [{"subject": subject, "why": why} for subject, why in self.absent],
            "figures": figures,
            "promises": promises,
        }
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return path


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
