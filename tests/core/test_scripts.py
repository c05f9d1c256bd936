"""How a script of the environment's world ends, told to the other ranks."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.launch.worlds import scripts

SCRIPT = """
import os, sys, time
from sparkvod.core import basics, objects
from sparkvod.errors import HorovodInternalError

seen = []
sys.excepthook = lambda *error: (seen.append(1), sys.__excepthook__(*error))
hook, leave = sys.excepthook, sys.exit
basics.init()
if basics.rank() == 1:
    print("ready", flush=True)
    {end}
begun = time.monotonic()
try:
    objects.allgather_object(None)
except HorovodInternalError as error:
    print(type(error).__name__, error, "| after", time.monotonic() - begun, flush=True)
basics.shutdown()
assert sys.excepthook is hook and sys.exit is leave
"""


def run_ranks(tmp_path: Path, end: str, interrupt: bool = False) -> tuple[int, str, str]:
    """Returns rank 1's exit code and standard error, and what rank 0 was told."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(end=end))
    with scripts([str(script)], 2) as ranks:
        if interrupt:
            assert ranks[1].stdout is not None
            assert ranks[1].stdout.readline() == "ready\n"
            time.sleep(0.2)
            ranks[1].send_signal(signal.SIGINT)
        told, complaint = ranks[0].communicate(timeout=40)
        assert ranks[0].returncode == 0, complaint
        _, shown = ranks[1].communicate(timeout=10)
        return ranks[1].returncode, shown, told


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("raise KeyError('the mistake of rank 1')", 1, "rank 1 raised KeyError: 'the mistake of rank 1'"),
        ("raise ValueError('x' * 5000 + '\\ud800')", 1, "rank 1 raised ValueError: xxxx"),
        ("assert seen", 1, "rank 1 raised AssertionError"),
        ("sys.exit(3)", 3, "rank 1 called sys.exit(3)"),
        ("sys.exit('no data')", 1, "rank 1 called sys.exit('no data')"),
    ],
)
def test_an_end_by_an_error_is_told_with_its_reason(tmp_path: Path, end: str, code: int, words: str) -> None:
    status, shown, told = run_ranks(tmp_path, end)
    assert status == code
    assert told.startswith("PeerLostError")
    assert words in told
    assert "exit" in end or "Traceback" in shown


@pytest.mark.timeout(60)
def test_an_interrupt_is_told(tmp_path: Path) -> None:
    status, shown, told = run_ranks(tmp_path, "time.sleep(30)", interrupt=True)
    assert status in (-signal.SIGINT, 130)
    assert "KeyboardInterrupt" in shown
    assert "rank 1 raised KeyboardInterrupt" in told


@pytest.mark.timeout(60)
@pytest.mark.parametrize("end", ["sys.exit()", "sys.exit(0)", "basics.shutdown(); raise KeyError('later')"])
def test_an_orderly_end_stays_one(tmp_path: Path, end: str) -> None:
    _, _, told = run_ranks(tmp_path, end)
    assert told.startswith("ShutDownError")
