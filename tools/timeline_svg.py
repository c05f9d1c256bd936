"""Draws a part of a merged timeline as SVG, for documents; to look around in one, open it in Perfetto.

python tools/timeline_svg.py trace.json -o picture.svg --step 3
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

Event = dict[str, Any]

WIDTH, LABELS, ROW, GAP, FONT = 1200, 230, 17, 10, 11
COLOURS = {
    "forward": "#7fb77e",
    "backward": "#4f9d69",
    "step": "#a5c882",
    "synchronize": "#e0e0e0",
    "negotiate": "#f2c14e",
    "queue": "#fbe8b0",
    "wait": "#d9d9d9",
    "wait for ranks": "#d9d9d9",
    "execute": "#4d8fcc",
    "reduce": "#1f5f99",
}
OTHERS = "#8db9e0"


def step_of(events: Sequence[Event], number: int) -> tuple[float, float]:
    """Returns when the step with that number (from 0) begins and ends, over all ranks, with a margin.

    Raises:
        ValueError: there are fewer steps.
    """
    begins: list[float] = []
    ends: list[float] = []
    for rank in sorted({event["pid"] for event in events}):
        steps = [event for event in events if event["pid"] == rank and event["name"] == "step"]
        if not 0 <= number < len(steps):
            raise ValueError(
                f"{len(steps)} steps of a DistributedOptimizer were found on rank {rank}, more than {max(number, 0)} "
                f"were expected for --step {number}"
            )
        begins.append(steps[number - 1]["ts"] + steps[number - 1]["dur"] if number else events[0]["ts"])
        ends.append(steps[number]["ts"] + steps[number]["dur"])
    if not ends:
        raise ValueError("no slices were found, those of a timeline were expected")
    margin = (max(ends) - min(begins)) * 0.01
    return min(begins) - margin, max(ends) + margin


def rows(events: Sequence[Event]) -> Iterator[tuple[Event, int]]:
    """Yields each slice of one lane with its depth; slices come in the order of their beginnings."""
    open_until: list[float] = []
    for event in events:
        while open_until and open_until[-1] <= event["ts"] + 0.002:
            open_until.pop()
        yield event, len(open_until)
        open_until.append(event["ts"] + event["dur"])


def draw(trace: dict[str, Any], begin: float, end: float, longest: int) -> str:
    """Returns the SVG of what lies between two times (microseconds); lanes show at most ``longest`` tensors a rank."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    ranks = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    lanes: dict[tuple[int, int], list[Event]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["ts"] < end and event["ts"] + event["dur"] > begin:
            lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    scale = (WIDTH - LABELS - 10) / (end - begin)
    parts: list[str] = []
    y = 24.0
    tensors = dict.fromkeys(ranks, 0)
    rank = None
    for (pid, tid), events in sorted(lanes.items()):
        if events[0]["cat"] == "tensor":
            tensors[pid] += 1
            if tensors[pid] > longest:
                continue
        if pid != rank:
            rank = pid
            y += GAP
            parts.append(f'<text x="4" y="{y + 12:.1f}" font-weight="bold">{escape(ranks.get(pid, str(pid)))}</text>')
            y += ROW + 2
        name = names.get((pid, tid), str(tid))
        parts.append(f'<text x="12" y="{y + 12:.1f}">{escape(name if len(name) < 34 else "…" + name[-33:])}</text>')
        deepest = 0
        for event, depth in rows(events):
            deepest = max(deepest, depth)
            left = max(event["ts"], begin)
            width = max((min(event["ts"] + event["dur"], end) - left) * scale, 0.4)
            x, top = LABELS + (left - begin) * scale, y + depth * ROW
            colour = COLOURS.get(event["name"], OTHERS)
            title = escape(f"{event['name']}: {event['dur'] / 1000:.3f} ms")
            parts.append(
                f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{ROW - 2}" fill="{colour}">'
                f"<title>{title}</title></rect>"
            )
            if width > 7 * len(event["name"]):
                ink = "#fff" if colour in ("#1f5f99", "#4d8fcc", "#4f9d69") else "#222"
                parts.append(f'<text x="{x + 3:.1f}" y="{top + 11:.1f}" fill="{ink}">{escape(event["name"])}</text>')
        y += (deepest + 1) * ROW + 3
    for tick in range(11):
        x = LABELS + (WIDTH - LABELS - 10) * tick / 10
        parts.append(f'<line x1="{x:.1f}" y1="20" x2="{x:.1f}" y2="{y:.1f}" stroke="#eee" stroke-width="0.6"/>')
        parts.append(f'<text x="{x - 12:.1f}" y="14" fill="#666">{(end - begin) * tick / 10000:.1f} ms</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 8:.0f}" '
        f'font-family="sans-serif" font-size="{FONT}"><rect width="100%" height="100%" fill="#fff"/>'
    )
    return head + "".join(parts) + "</svg>\n"


def load(path: Path) -> dict[str, Any]:
    """Returns a merged trace.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        trace = json.loads(text)
    except ValueError:
        trace = None
    if not isinstance(trace, dict) or "traceEvents" not in trace:
        raise ValueError(
            f"{path} was found to be no merged trace, one that python -m sparkvod.observe.timeline merge wrote was "
            "expected"
        )
    return trace


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", help="a merged trace")
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--step", type=int, default=1, help="which step of the optimizer to draw")
    parser.add_argument("--tensors", type=int, default=8, help="lanes of tensors for each rank")
    arguments = parser.parse_args()
    try:
        trace = load(Path(arguments.trace))
        begin, end = step_of([event for event in trace["traceEvents"] if event["ph"] == "X"], arguments.step)
        Path(arguments.output).write_text(draw(trace, begin, end, arguments.tensors), encoding="utf-8")
    except (OSError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
