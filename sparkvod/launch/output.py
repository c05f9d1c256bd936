"""Workers' lines: taken from their streams on the worker, printed with their rank on the driver."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

from sparkvod.observe import progress

_LONGEST_LINE = 64 << 10


class LinePrinter:
    """Prints ``[rank]<stdout>:line`` on the driver's streams.

    Args:
        verbose: 0 prints nothing.
        stdout: where lines of the ranks' standard output go; None: wherever ``sys.stdout`` points at that moment.
        stderr: the same for their standard error.
        timestamp: puts the time before each line.
    """

    def __init__(
        self, verbose: int, stdout: IO[str] | None = None, stderr: IO[str] | None = None, timestamp: bool = False
    ) -> None:
        self._verbose, self._streams, self._timestamp = verbose, {"stdout": stdout, "stderr": stderr}, timestamp

    def __call__(self, rank: int, stream: str, line: str) -> None:
        """Prints one line; ``stream`` is ``"stdout"`` or ``"stderr"``."""
        target = self._streams.get(stream)
        if target is None:
            if not self._verbose:
                return
            target = sys.stderr if stream == "stderr" else sys.stdout
        stamp = time.strftime("%a %b %d %H:%M:%S %Y") if self._timestamp else ""
        progress.write_line(f"{stamp}[{rank}]<{stream}>:{line}", target)


class LineTee(io.TextIOBase):
    """A text stream that hands on whole lines, and passes everything to the stream it replaces when asked.

    Args:
        emit: called with each line, without its end.
        original: the stream that this one replaces.
        copy: whether it gets everything too.
    """

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, emit: Callable[[str], None], original: Any, copy: bool) -> None:
        self._emit, self._original, self._copy = emit, original, copy
        self._partial = ""
        self._ended = False
        # A line that the emitter itself writes (a warning about its own failure) must not come back to it.
        self._busy = threading.local()
        self._lock, self._pid = threading.Lock(), os.getpid()

    def writable(self) -> bool:
        """Returns True."""
        return True

    def write(self, text: str) -> int:
        """Takes text; lines that it completes are handed on."""
        if self._ended or self._copy or getattr(self._busy, "now", False):
            self._original.write(text)
        if not self._ended and not getattr(self._busy, "now", False):
            if os.getpid() != self._pid:  # a forked child: another thread's lock would stay held, half a line twice
                self._lock, self._pid, self._partial = threading.Lock(), os.getpid(), ""
            with self._lock:
                *lines, self._partial = (self._partial + text).split("\n")
                if len(self._partial) > _LONGEST_LINE:
                    lines, self._partial = [*lines, self._partial], ""
            self._hand_on(lines)
        return len(text)

    def flush(self) -> None:
        """Flushes the original; a line that is not complete waits for its end."""
        self._original.flush()

    def fileno(self) -> int:
        """Returns the original's descriptor: what is written there is not seen here."""
        return int(self._original.fileno())

    def isatty(self) -> bool:
        """Returns False."""
        return False

    @property
    def buffer(self) -> Any:
        """The original's byte stream: what is written there is not seen here."""
        return self._original.buffer

    def end(self) -> None:
        """Hands on what is left; from now on the original gets everything, for whoever still holds this stream."""
        with self._lock:
            left, self._partial = self._partial, ""
        self._hand_on([left] if left else [])
        self._ended = True

    def _hand_on(self, lines: list[str]) -> None:
        self._busy.now = True
        try:
            for line in lines:
                self._emit(line.rstrip("\r").rsplit("\r", 1)[-1])  # what a progress bar shows in the end
        finally:
            self._busy.now = False


@contextlib.contextmanager
def captured(emit: Callable[[str, str], None], copy: bool) -> Iterator[None]:
    """Sends what the body prints to ``emit(stream, line)``, and restores ``sys.stdout`` and ``sys.stderr`` after it.

    Logging handlers that hold the old streams follow, there and back: in a process that serves several runs, they
    were made in one and log in the next.

    Args:
        emit: gets each line.
        copy: whether the old streams get it too.
    """
    before = {"stdout": sys.stdout, "stderr": sys.stderr}
    tees = {name: LineTee(lambda line, n=name: emit(n, line), stream, copy) for name, stream in before.items()}  # type: ignore[misc]
    for name, tee in tees.items():
        setattr(sys, name, tee)
        _move_handlers(before[name], tee)
    try:
        yield
    finally:
        for name, tee in tees.items():
            if getattr(sys, name) is tee:
                setattr(sys, name, before[name])
            _move_handlers(tee, before[name])
            tee.end()


def _move_handlers(old: Any, new: Any) -> None:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)
