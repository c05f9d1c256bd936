"""A progress bar on the driver, fed by the events that workers post."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import IO, Any

_PLAIN_SECONDS = 5.0


def write_line(text: str, stream: IO[str]) -> None:
    """Writes one line to a stream, above a progress bar that may stand there."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is None or not getattr(tqdm, "_instances", None):
        stream.write(text + "\n")
        stream.flush()
    else:
        tqdm.write(text, file=stream)


class ProgressBar:
    """Shows an epoch's progress with loss and rows/s; a callable to be given as ``on_event``.

    It takes events of the kind ``progress`` with the fields ``epoch`` (from 0), ``epochs``, ``step`` (steps done in
    this epoch), ``steps``, ``rows`` (rows that all ranks have done in this epoch), ``loss``, ``val_loss`` (either may
    be missing), and of the kind ``phase``, whose ``text`` is a line of its own: what goes on before there are steps.
    Others are ignored. Rank 0's are shown, because all ranks are at the same step. In a terminal or a notebook it is
    a bar of tqdm, elsewhere (a log file, a pipe, a terminal that does not tell its width) one line every few seconds
    and at each epoch's end.

    Args:
        stream: where to draw; standard error by default.
        plain: True for lines, False for a bar; None finds out.
        interval: seconds between two lines.
    """

    def __init__(
        self, stream: IO[str] | None = None, plain: bool | None = None, interval: float = _PLAIN_SECONDS
    ) -> None:
        self._stream, self._interval = stream, interval
        self._plain = not _can_draw(stream or sys.stderr) if plain is None else plain
        self._bar: Any = None
        self._epoch: int | None = None
        self._rows = self._began = 0.0
        self._last_line = -math.inf

    def __call__(self, event: dict[str, Any]) -> None:
        """Takes one event."""
        if event.get("rank", 0) != 0:
            return
        if event.get("kind") == "phase":
            self.close()  # a run that starts again begins a new bar
            write_line(str(event.get("text")), self._stream or sys.stderr)
        if event.get("kind") != "progress":
            return
        epoch, step, steps = int(event["epoch"]), int(event["step"]), int(event["steps"])
        now = float(event.get("time", time.time()))
        first = epoch != self._epoch
        if first:
            self._end_epoch()
            self._epoch, self._began, self._last_line = epoch, now, -math.inf
            self._rows = float(event.get("rows", 0))  # rows done before the first report have no time of ours
        name = f"epoch {epoch + 1}" + (f"/{event['epochs']}" if event.get("epochs") else "")
        figures = self._figures(event, now)
        if first and step < steps:
            figures.pop("rows/s", None)  # of a step or two, the first of which warms everything up
        if self._plain:
            self._print(name, step, steps, figures, now)
        else:
            self._draw(name, step, steps, figures)

    def close(self) -> None:
        """Ends the bar and leaves its last state standing."""
        self._end_epoch()
        self._epoch = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _figures(self, event: dict[str, Any], now: float) -> dict[str, str]:
        figures = {name: f"{event[name]:.4g}" for name in ("loss", "val_loss") if event.get(name) is not None}
        rate = event.get("rows_per_second")
        if rate is None and "rows" in event and now > self._began:
            rate = (event["rows"] - self._rows) / (now - self._began)
        if rate:
            figures["rows/s"] = f"{rate:,.0f}"
        return figures

    def _print(self, name: str, step: int, steps: int, figures: dict[str, str], now: float) -> None:
        if step < steps and time.monotonic() - self._last_line < self._interval:
            return
        self._last_line = time.monotonic()
        share = f" ({100 * step // steps} %)" if steps else ""
        text = ", ".join(f"{k} {v}" for k, v in figures.items())
        write_line(f"{name}: step {step}/{steps}{share}" + (f", {text}" if text else ""), self._stream or sys.stderr)

    def _draw(self, name: str, step: int, steps: int, figures: dict[str, str]) -> None:
        if self._bar is None:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=steps, desc=name, unit="step", file=self._stream or sys.stderr, dynamic_ncols=True)
        self._bar.total = steps
        self._bar.set_postfix(figures, refresh=False)
        self._bar.update(step - self._bar.n)
        if step >= steps:
            self._bar.refresh()

    def _end_epoch(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _can_draw(stream: IO[str]) -> bool:
    try:
        import tqdm  # noqa: F401
    except ImportError:
        return False
    ipython: Any = sys.modules.get("IPython")  # whose shell has a kernel in a notebook, and none in a terminal
    if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
        return True
    try:
        return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
    except (AttributeError, OSError, ValueError):  # no file, or closed
        return False
