"""Plots of what the benches wrote, as SVG. Needs matplotlib, which only this module does."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

# By subject, so that a subject has one colour in all plots.
COLOURS = {
    "torch-gloo": "#c44e52",
    "Open MPI": "#dd8452",
    "sparkvod": "#4c72b0",
    "sparkvod, engine memory": "#55a868",
    "native path": "#8172b3",
    "native path, engine memory": "#937860",
    "limit, in place": "#8c8c8c",
    "limit, staged": "#bcbcbc",
}
_SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}


def _figures(content: dict[str, Any], pattern: str) -> list[tuple[re.Match[str], str, float]]:
    """Returns (match of the case, subject, median) of the figures whose case has the form of the pattern."""
    found = []
    for figure in content["figures"]:
        match = re.fullmatch(pattern, figure["case"])
        if match is not None:
            found.append((match, figure["subject"], figure["median"]))
    return found


def allreduce(content: dict[str, Any], plt: Any) -> Any:
    """Time of an allreduce by size and subject: one panel for each number of ranks."""
    found = _figures(content, r"allreduce ([\d.]+) (B|KiB|MiB), (\d+) ranks")
    sizes = sorted({int(match[3]) for match, _, _ in found})
    figure, axes = plt.subplots(1, len(sizes), figsize=(4.2 * len(sizes), 4), sharey=True, squeeze=False)
    for ranks, axis in zip(sizes, axes[0], strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for match, subject, median in found:
            if int(match[3]) == ranks:
                lines.setdefault(subject, []).append((float(match[1]) * _SIZES[match[2]], median * 1e6))
        for subject, colour in COLOURS.items():
            if subject in lines:
                style = ":" if subject.startswith("limit") else "--" if subject.startswith("native") else "-"
                axis.plot(
                    *zip(*sorted(lines[subject]), strict=True), style, marker="o", ms=3, color=colour, label=subject
                )
        axis.set(xscale="log", yscale="log", xlabel="bytes", title=f"{ranks} ranks")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("µs")
    axes[0][0].legend(fontsize=7)
    return figure


def collectives(content: dict[str, Any], plt: Any) -> Any:
    """How many times as fast as each peer: one panel for each number of ranks."""
    found = _figures(content, r"(\w+ \d+ MiB), (\d+) ranks")
    sizes = sorted({int(match[2]) for match, _, _ in found})
    figure, axes = plt.subplots(1, len(sizes), figsize=(4.2 * len(sizes), 4), sharey=True, squeeze=False)
    for ranks, axis in zip(sizes, axes[0], strict=True):
        median = {(match[1], subject): value for match, subject, value in found if int(match[2]) == ranks}
        cases = list(dict.fromkeys(case for case, _ in median))
        for place, peer in enumerate(("torch-gloo", "Open MPI")):
            times = [median.get((case, peer), math.nan) / median[case, "sparkvod"] for case in cases]
            places = [i + 0.4 * place - 0.2 for i in range(len(cases))]
            axis.bar(places, times, 0.4, color=COLOURS[peer], label=f"{peer}'s time ÷ ours")
        axis.axhline(1, color="black", lw=0.8)
        axis.set(yscale="log", title=f"{ranks} ranks", xticks=range(len(cases)))
        axis.set_xticklabels(cases, rotation=60, ha="right", fontsize=7)
        axis.grid(alpha=0.3, axis="y")
    axes[0][0].legend(fontsize=7)
    return figure


def control(content: dict[str, Any], plt: Any) -> Any:
    """A rank's processor time for a negotiation by number of ranks, with growth by log n beside it."""
    found = [(int(match[1]), median * 1e6) for match, _, median in _figures(content, r"negotiation .*, (\d+) ranks")]
    figure, axis = plt.subplots(figsize=(5, 3.6))
    ranks, times = zip(*sorted(found), strict=True)
    axis.plot(ranks, times, "o-", color=COLOURS["sparkvod"], label="measured, per rank")
    base = times[0] / math.log2(ranks[0])
    axis.plot(ranks, [base * math.log2(n) for n in ranks], ":", color="black", label="growth by log n")
    axis.set_xscale("log", base=2)
    axis.set(xlabel="ranks", ylabel="µs of processor time", ylim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return figure


PLOTS: dict[str, Callable[[dict[str, Any], Any], Any]] = {
    "allreduce": allreduce,
    "collectives": collectives,
    "control": control,
}


def write(name: str, content: dict[str, Any], folder: Path) -> Path | None:
    """Writes the plot of a bench.

    Args:
        name: of the bench.
        content: of its JSON file.
        folder: where the plot goes.

    Returns:
        Its path, None for a bench that has no plot, or that measured nothing to be drawn.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    if name not in PLOTS or not content["figures"]:
        return None
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError("the plots need matplotlib; run 'pip install matplotlib'") from None
    matplotlib.use("agg")
    # The same figures make the same file, and text stays text.
    matplotlib.rcParams.update({"svg.hashsalt": name, "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    figure = PLOTS[name](content, plt)
    path = folder / f"bench-{name}.svg"
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    text = path.read_text(encoding="utf-8")
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")
    return path
