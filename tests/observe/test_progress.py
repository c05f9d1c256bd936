from __future__ import annotations

import fcntl
import io
import pty
import select
import struct
import termios
from typing import Any

import pytest

from sparkvod.observe.progress import ProgressBar, write_line


def event(epoch: int, step: int, time: float, **fields: Any) -> dict[str, Any]:
    base = {"kind": "progress", "rank": 0, "epoch": epoch, "epochs": 2, "step": step, "steps": 10, "time": time}
    return {**base, "rows": step * 100, **fields}


def test_plain_lines_with_loss_and_rows_per_second() -> None:
    stream = io.StringIO()
    with ProgressBar(stream, plain=True, interval=0) as bar:
        bar(event(0, 0, 100.0))
        bar(event(0, 5, 101.0, loss=0.5))
        bar(event(0, 10, 102.0, loss=0.25, val_loss=0.125))
        bar(event(1, 10, 104.0, loss=0.2, rows_per_second=123456.7))
    assert stream.getvalue().splitlines() == [
        "epoch 1/2: step 0/10 (0 %)",
        "epoch 1/2: step 5/10 (50 %), loss 0.5, rows/s 500",
        "epoch 1/2: step 10/10 (100 %), loss 0.25, val_loss 0.125, rows/s 500",
        "epoch 2/2: step 10/10 (100 %), loss 0.2, rows/s 123,457",
    ]


def test_lines_are_seldom_but_each_epoch_ends_with_one() -> None:
    stream = io.StringIO()
    with ProgressBar(stream, plain=True, interval=3600) as bar:
        for step in range(11):
            bar(event(0, step, 100.0 + step))
    assert [line.split(",")[0] for line in stream.getvalue().splitlines()] == [
        "epoch 1/2: step 0/10 (0 %)",
        "epoch 1/2: step 10/10 (100 %)",
    ]


@pytest.mark.parametrize("foreign", [{"kind": "log"}, {"rank": 1}])
def test_other_events_are_ignored(foreign: dict[str, Any]) -> None:
    stream = io.StringIO()
    with ProgressBar(stream, plain=True) as bar:
        bar({**event(0, 1, 1.0), **foreign})
    assert stream.getvalue() == ""


def test_a_bar_is_drawn_and_lines_stand_above_it() -> None:
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    stream = io.StringIO()
    with ProgressBar(stream, plain=False) as bar:
        bar(event(0, 5, 101.0, loss=0.5))
        write_line("a line", stream)
        bar(event(0, 10, 102.0, loss=0.25))
        bar(event(1, 3, 103.0))
    drawn = stream.getvalue()
    assert "a line\n" in drawn
    for part in ("epoch 1/2", "10/10", "loss=0.25", "epoch 2/2"):
        assert part in drawn, drawn


def test_an_epoch_without_steps() -> None:
    stream = io.StringIO()
    with ProgressBar(stream, plain=True) as bar:
        bar({"kind": "progress", "rank": 0, "epoch": 0, "epochs": 1, "step": 0, "steps": 0, "time": 1.0})
    assert stream.getvalue() == "epoch 1/1: step 0/0\n"


def test_the_first_line_of_an_epoch_has_no_rate_yet() -> None:
    stream = io.StringIO()
    with ProgressBar(stream, plain=True, interval=0) as bar:
        for epoch in range(2):
            for step in (1, 5, 10):
                bar(event(epoch, step, 100.0 + step, loss=0.5, rows_per_second=3.0 if step == 1 else 999.0))
    lines = stream.getvalue().splitlines()
    assert [("rows/s" in line) for line in lines] == [False, True, True] * 2


def test_phases_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    for plain in (True, False):
        stream = io.StringIO()
        with ProgressBar(stream, plain=plain) as bar:
            bar({"kind": "phase", "text": "preparing the data"})
            bar(event(0, 5, 101.0))
            bar({"kind": "phase", "text": "starting 2 ranks"})
            bar(event(0, 3, 102.0))
        drawn = stream.getvalue()
        assert drawn.startswith("preparing the data\n")
        assert "starting 2 ranks\n" in drawn
        assert drawn.index("5/10") < drawn.index("starting") < drawn.index("3/10")


@pytest.mark.parametrize("columns", [0, 90])
def test_a_terminal_without_a_size_gets_lines(columns: int) -> None:
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30 if columns else 0, columns, 0, 0))
    with open(ours, "rb", buffering=0) as reader, open(theirs, "w") as stream:
        with ProgressBar(stream) as bar:
            bar(event(0, 5, 101.0, loss=0.5))
            bar(event(0, 10, 102.0, loss=0.5))
        stream.flush()
        drawn = ""
        while select.select([reader], [], [], 0.5)[0]:  # the terminal hands on in pieces
            drawn += reader.read(10000).decode()
    if columns:
        assert "\r" in drawn.replace("\r\n", "")
        assert "10/10" in drawn
    else:
        assert (
            drawn == "epoch 1/2: step 5/10 (50 %), loss 0.5\r\nepoch 1/2: step 10/10 (100 %), loss 0.5, rows/s 500\r\n"
        )


def test_a_stream_that_is_no_terminal_gets_lines() -> None:
    class Odd(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Odd()
    ProgressBar(stream)(event(0, 5, 101.0))
    assert stream.getvalue() == "epoch 1/2: step 5/10 (50 %)\n"
