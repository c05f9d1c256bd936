"""Ranks of a bench meet and compare their times; what other processes measure is asked of them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import openmpi, program
from benchmarks.meeting import MOST_CALLS, MOST_RANKS, Meeting


def in_threads(path: Path, size: int, body: Callable[[Meeting], float], cores: int = 16) -> list[float]:
    results = [0.0] * size
    threads = [
        threading.Thread(target=lambda rank=rank: results.__setitem__(rank, body(Meeting(path, rank, size, cores))))
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def test_a_call_lasts_from_the_last_start_to_the_last_end(tmp_path: Path) -> None:
    def body(meeting: Meeting) -> float:
        starts = [1.0 + meeting.rank, 2.0, 0.0]
        ends = [7.0, 9.0 + meeting.rank, 1.0]
        return meeting.compare(starts, ends, back_to_back=False)

    # 7 - 3, 11 - 2, 1 - 0; among more ranks than cores, which start one after the other, 7 - 1, 11 - 2, 1 - 0
    assert in_threads(Meeting.make(tmp_path / "page"), 3, body, cores=3) == [4.0] * 3
    assert in_threads(Meeting.make(tmp_path / "other"), 3, body, cores=2) == [6.0] * 3


def test_calls_back_to_back_last_as_long_as_on_the_slowest_rank(tmp_path: Path) -> None:
    def body(meeting: Meeting) -> float:
        return meeting.compare([0.0, 0.0, 0.0], [1.0 + meeting.rank, 5.0 - meeting.rank, 9.0], back_to_back=True)

    assert in_threads(Meeting.make(tmp_path / "page"), 2, body) == [5.0] * 2


@pytest.mark.parametrize("prepared", [False, True])
def test_what_prepares_a_call_is_not_timed(tmp_path: Path, prepared: bool) -> None:
    calls: list[str] = []

    def body(meeting: Meeting) -> float:
        def prepare() -> None:
            time.sleep(0.02)

        return meeting.timed(lambda: calls.append(""), 5, prepare if prepared else None)

    values = in_threads(Meeting.make(tmp_path / "page"), 2, body)
    assert values[0] == values[1] < 0.02
    assert len(calls) == 2 * (5 + 1)


def test_the_page_has_room_for_all_ranks_and_calls(tmp_path: Path) -> None:
    path = Meeting.make(tmp_path / "page")
    last = Meeting(path, MOST_RANKS - 1, 1)
    last._times[2 * MOST_CALLS * MOST_RANKS - 1] = 1.0  # the last call's end
    with pytest.raises(IndexError):
        last._times[2 * MOST_CALLS * MOST_RANKS] = 1.0


def test_open_mpi_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmpi.importlib.util, "find_spec", lambda name: None)
    assert openmpi.missing() == "not installed (mpi4py)"
    with openmpi.world(tmp_path / "none", 2) as folder:
        assert folder is None


def test_a_mode_of_the_native_program_that_fails_says_why() -> None:
    assert program.run(Path(sys.executable), "-c", "print('{\"seconds\": 2.5}')") == {"seconds": 2.5}
    with pytest.raises(RuntimeError, match="ended with 1:\nno positive number"):
        program.run(Path(sys.executable), "-c", "raise SystemExit('no positive number')")
