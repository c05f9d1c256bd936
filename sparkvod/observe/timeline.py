"""Timelines of ranks: where they are written, how they become one, and how much communication they hide.

``python -m sparkvod.observe.timeline merge trace.rank0.json trace.rank1.json -o trace.json`` makes one trace that
Perfetto (https://ui.perfetto.dev) and chrome://tracing open: a process per rank, in it a lane of the engine, one for
each thread that was marked and one for each tensor. ``... summary trace.json`` prints what was hidden.

Ranks of one boot of one host share the monotonic clock. Hosts share the time of day, as well as it is kept; where it
contradicts the negotiations, which no rank ends before all have begun, a host is moved to where it agrees with them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Interval = tuple[float, float]

_CYCLE = re.compile(r"cycle (\d+)\b")
# What a thread does while it waits for the engine is no computation.
WAITING = frozenset({"synchronize"})


def path_of(path: str | os.PathLike[str], rank: int) -> str:
    """Returns the file of one rank: ``trace.json`` becomes ``trace.rank0.json``, ``{rank}`` the rank.

    Raises:
        TypeError: it is no path.
        ValueError: it names no file.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"file_path={path!r} was found, the path of a file, as /tmp/trace.json, was expected")
    path = os.fspath(path)
    if not Path(path).name:
        raise ValueError(f"file_path={path!r} was found, the path of a file, as /tmp/trace.json, was expected")
    if "{rank}" in path:
        return path.replace("{rank}", str(rank))
    whole = Path(path)
    return str(whole.with_name(f"{whole.stem}.rank{rank}{whole.suffix or '.json'}"))


@dataclass
class Trace:
    """One rank's timeline as it was written.

    Attributes:
        rank: its rank.
        host: name of its host.
        boot: identity of that host's boot, which its monotonic clock belongs to.
        monotonic_ns: that clock when the times of the events were 0.
        unix_ns: the time of day then.
        events: Chrome's trace events, times in microseconds.
        dropped: slices that the writer could not hold; None when the file has no end.
    """

    rank: int
    host: str
    boot: str
    monotonic_ns: int
    unix_ns: int
    events: list[Event] = field(default_factory=list)
    dropped: int | None = None


def read(path: str | Path) -> Trace:
    """Reads one rank's file; one that a killed rank has left unfinished is read as far as it goes.

    Raises:
        ValueError: it is no timeline of ours.
    """
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    events = []
    for line in text.splitlines():
        body = line.strip().rstrip(",").lstrip(",")
        if body in ("", "[", "]"):
            continue
        try:
            event = json.loads(body)
        except ValueError:
            break  # the line on which the writer was ended
        if not isinstance(event, dict):
            break  # no file of ours
        events.append(event)
    clock = next((event["args"] for event in events if event.get("name") == "sparkvod_clock"), None)
    if clock is None:
        raise ValueError(f"{path} was found to be no timeline of a rank, one that sparkvod wrote was expected")
    end = next((event["args"] for event in events if event.get("name") == "sparkvod_end"), None)
    return Trace(
        clock["rank"],
        clock["host"],
        clock["boot_id"],
        clock["monotonic_ns"],
        clock["unix_ns"],
        [event for event in events if event.get("name") not in ("sparkvod_clock", "sparkvod_end")],
        None if end is None else end["dropped"],
    )


def merge(paths: Iterable[str | Path]) -> dict[str, Any]:
    """Merges ranks' files into one trace, on one clock that begins with the first event.

    Returns:
        A trace in Chrome's format: ``traceEvents``, and in ``otherData`` what was dropped, by rank.

    Raises:
        ValueError: there is no file, one is no timeline of ours, or a rank comes twice.
    """
    traces = sorted((read(path) for path in paths), key=lambda trace: trace.rank)
    if not traces:
        raise ValueError("no timeline was found, at least one was expected")
    ranks = [trace.rank for trace in traces]
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise ValueError(f"ranks {twice} were found twice, one file for each rank of one run was expected")
    shifts = _shifts(traces)
    metadata: list[Event] = []
    slices: list[Event] = []
    for trace in traces:
        for event in trace.events:
            if event.get("ph") == "M":
                metadata.append(event)
            else:
                slices.append({**event, "ts": event["ts"] + shifts[trace.rank]})
    first = min((event["ts"] for event in slices), default=0.0)
    for event in slices:
        event["ts"] = round(event["ts"] - first, 3)
    # Those that hold others come before them.
    slices.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return {
        "traceEvents": metadata + slices,
        "displayTimeUnit": "ms",
        "otherData": {"dropped": {str(trace.rank): trace.dropped for trace in traces}},
    }


def _shifts(traces: Sequence[Trace]) -> dict[int, float]:
    # Microseconds to add to each rank's times, so that they become the first rank's.
    reference = traces[0]
    boots: dict[str, list[Trace]] = {}
    for trace in traces:
        boots.setdefault(trace.boot, []).append(trace)
    shifts = {}
    for boot, ranks in boots.items():
        for trace in ranks:
            shifts[trace.rank] = (trace.monotonic_ns - ranks[0].monotonic_ns) / 1000
        if boot == reference.boot:
            continue
        apart = (ranks[0].unix_ns - reference.unix_ns) / 1000
        for trace in ranks:
            shifts[trace.rank] += apart
        correction = _correction(_cycles(boots[reference.boot], shifts), _cycles(ranks, shifts))
        for trace in ranks:
            shifts[trace.rank] += correction
    return shifts


def _cycles(traces: Sequence[Trace], shifts: dict[int, float]) -> dict[int, Interval]:
    # Of each negotiation: when the last of these ranks began it, and when the first ended it.
    found: dict[int, Interval] = {}
    for trace in traces:
        for event in trace.events:
            match = _CYCLE.match(event.get("args", {}).get("detail", "")) if event.get("name") == "negotiate" else None
            if match:
                begin = event["ts"] + shifts[trace.rank]
                before = found.get(int(match[1]), (begin, begin + event["dur"]))
                found[int(match[1])] = (max(begin, before[0]), min(begin + event["dur"], before[1]))
    return found


def _correction(reference: dict[int, Interval], others: dict[int, Interval]) -> float:
    # No rank ends a negotiation before every rank has begun it.
    common = reference.keys() & others.keys()
    if not common:
        return 0.0
    least = max(reference[c][0] - others[c][1] for c in common)
    most = min(reference[c][1] - others[c][0] for c in common)
    if least > most:  # the clocks drift apart by more than the negotiations take
        return (least + most) / 2
    return 0.0 if least <= 0 <= most else (least + most) / 2


@dataclass
class Hidden:
    """How much of a rank's communication its computation hid, in seconds."""

    communication: float
    computation: float
    both: float

    @property
    def share(self) -> float:
        """The part of the communication that ran while the application computed, 0 to 1."""
        return self.both / self.communication if self.communication else 0.0


def hidden(trace: dict[str, Any]) -> dict[int, Hidden]:
    """Returns for each rank of a merged trace how communication and computation overlap.

    Communication is all that the engine's lane shows; computation what threads were marked with, but for waiting.
    """
    lanes: dict[int, tuple[list[Interval], list[Interval]]] = {}
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        communication, computation = lanes.setdefault(event["pid"], ([], []))
        interval = (event["ts"], event["ts"] + event["dur"])
        if event["cat"] == "engine":
            communication.append(interval)
        elif event["cat"] == "thread" and event["name"] not in WAITING:
            computation.append(interval)
    result = {}
    for rank, (communication, computation) in sorted(lanes.items()):
        busy, computing = _union(communication), _union(computation)
        result[rank] = Hidden(_length(busy), _length(computing), _length(_intersection(busy, computing)))
    return result


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def _intersection(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    result, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            result.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return result


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals) * 1e-6


def _merged(path: str) -> dict[str, Any]:
    """Returns a trace that was merged, or makes one of a rank's own file."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError:  # not whole, as a killed rank leaves it, or no trace at all, which the merge tells
        found = None
    return found if isinstance(found, dict) and "traceEvents" in found else merge([path])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: ``merge`` and ``summary``. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sparkvod.observe.timeline", description="Timelines of ranks.")
    commands = parser.add_subparsers(dest="command", required=True)
    merging = commands.add_parser("merge", help="make one trace of the ranks' files")
    merging.add_argument("files", nargs="+", help="one file for each rank")
    merging.add_argument("-o", "--output", required=True, help="the trace to write")
    summary = commands.add_parser("summary", help="print how much communication was hidden behind computation")
    summary.add_argument("file", help="a merged trace, or one rank's file")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "merge":
            trace = merge(chosen.files)
            Path(chosen.output).write_text(json.dumps(trace), encoding="utf-8")
            lost = {rank: n for rank, n in trace["otherData"]["dropped"].items() if n}
            if lost:
                sys.stderr.write(f"slices that were dropped because the writer was behind, by rank: {lost}\n")
        else:
            for rank, h in hidden(_merged(chosen.file)).items():
                sys.stdout.write(
                    f"rank {rank}: communication {h.communication:.3f} s, computation {h.computation:.3f} s, "
                    f"hidden {100 * h.share:.0f} %\n"
                )
    except (OSError, ValueError, KeyError) as e:
        sys.stderr.write(f"{parser.prog}: {e}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
