"""The timeline of this rank: started and stopped at run time, and what the application tells it about itself."""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType

from sparkvod.core import basics
from sparkvod.observe.timeline import path_of


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begins to write what this rank does to a file in Chrome's trace format.

    Every rank that shall be seen calls it; each writes a file of its own, and
    ``python -m sparkvod.observe.timeline merge`` makes one of them.

    Args:
        file_path: path for all ranks: ``{rank}`` in it is replaced by the rank, else ``rank<n>`` is put before its
            suffix.
        mark_cycles: whether negotiations that agreed on nothing are shown too.

    Raises:
        NotInitializedError: there is no world.
        TypeError: ``file_path`` is no path.
        ValueError: it names no file, a timeline runs already, or the file cannot be written.
    """
    engine = basics.engine()
    engine.start_timeline(path_of(file_path, engine.rank), mark_cycles)


def stop_timeline() -> None:
    """Writes what is left and closes this rank's file; does nothing when none is written."""
    basics.engine().stop_timeline()


def mark(name: str, begin_ns: int, lane: str = "") -> None:
    """Tells the timeline that ``name`` went on from ``begin_ns`` (of ``time.monotonic_ns()``) until now.

    Args:
        name: name of the slice.
        begin_ns: when it began.
        lane: name of the lane; the current thread's by default. Slices of one lane must nest or follow each other.
    """
    engine = basics.running_engine()
    if engine is not None and engine.timeline_on:
        lane, name = (
            text.encode(errors="replace").decode() for text in (lane or threading.current_thread().name, name)
        )
        engine.mark(lane, name, begin_ns, time.monotonic_ns())


class timeline_span:  # noqa: N801
    """A context manager: what this thread does in its body is one slice of the timeline, beside the engine's.

    Args:
        name: name of the slice, for example ``"forward"``.
        lane: name of the lane; the current thread's by default.

    Raises:
        TypeError: a name is no string.
    """

    __slots__ = ("_begin_ns", "_lane", "_name")

    def __init__(self, name: str, lane: str = "") -> None:
        # Here, whether or not a timeline runs: at the end it would hide what the body raised.
        for what, value in (("name", name), ("lane", lane)):
            if not isinstance(value, str):
                raise TypeError(f"{what}={value!r} of a timeline's slice was found, a string was expected")
        self._name, self._lane = name, lane

    def __enter__(self) -> timeline_span:
        self._begin_ns = time.monotonic_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        mark(self._name, self._begin_ns, self._lane)
