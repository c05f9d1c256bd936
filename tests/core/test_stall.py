"""A rank that does not come is warned of by one of those that wait, shows its stacks if asked to, and is named at last.

The ranks' standard errors are looked at as the launcher prints them.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import time
from typing import Any

import pytest

import sparkvod
from sparkvod.core import basics
from sparkvod.errors import CollectiveTimeoutError

SIZE = 3
LATE = 2


def _allreduce(name: str) -> int:
    engine = basics.engine()
    memory = engine.allocate(8)
    handle = engine.allreduce(name, memory.address, memory.address, 2, 8, 1)
    engine.wait(handle)
    engine.release(handle)
    return handle


def sleep_late(seconds: float) -> None:
    """Stands where a reader would see it in a stack."""
    time.sleep(seconds)


def come_late(seconds: float, fails: bool) -> str:
    basics.init()
    _allreduce("known")
    _allreduce("known")  # from now on one bit
    if basics.rank() == LATE:
        sleep_late(seconds)
    try:
        _allreduce("known")
    except CollectiveTimeoutError as error:
        assert fails
        return str(error)
    except sparkvod.errors.HorovodInternalError:
        return ""
    # The world is whole: the late one has come.
    assert not fails
    _allreduce("new")
    return ""


def world(capfd: pytest.CaptureFixture[str], *args: Any, **env: str) -> tuple[list[str], str]:
    knobs = {f"SPARKVOD_{name.upper()}": value for name, value in env.items()}
    results = sparkvod.run_local(come_late, args, np=SIZE, env=knobs, verbose=1, timeout=60)
    return results, capfd.readouterr().err


@pytest.mark.timeout(90)
def test_one_rank_warns_of_the_late_one_which_shows_its_stacks(
    capfd: pytest.CaptureFixture[str], no_leaks: None
) -> None:
    _, said = world(capfd, 2.2, False, stall_check_time_seconds="0.6", stall_stacks="1")
    warnings = re.findall(
        r"'known' \(allreduce \(sum\) of float32 \[2\]\) was not submitted by rank 2 on [^,]+, .*", said
    )
    # One rank warns, once per interval, however many wait.
    assert 1 <= len(warnings) <= 3, said
    assert all("for which ranks 0,1 have waited" in warning for warning in warnings)
    assert all("[0]<stderr>" in line for line in said.splitlines() if "was not submitted by" in line)
    assert re.search(
        r"\[2\]<stderr>.*this rank is late: it has not submitted 'known' .* for which ranks 0,1 wait", said
    )
    assert re.search(r"\[2\]<stderr>.*in sleep_late", said)
    assert not re.search(r"\[[01]\]<stderr>.*in come_late", said)


@pytest.mark.timeout(90)
def test_without_the_knob_no_stacks_and_without_a_late_rank_no_warning(capfd: pytest.CaptureFixture[str]) -> None:
    _, said = world(capfd, 1.0, False, stall_check_time_seconds="0.5")
    assert "was not submitted by rank 2" in said
    assert "sleep_late" not in said
    _, said = world(capfd, 0.0, False, stall_check_time_seconds="5", stall_stacks="1")
    assert "was not submitted" not in said
    _, said = world(capfd, 1.0, False, stall_check_time_seconds="0")
    assert "was not submitted" not in said


@pytest.mark.timeout(90)
def test_it_fails_with_the_same_words(capfd: pytest.CaptureFixture[str]) -> None:
    results, said = world(capfd, 2.5, True, stall_check_time_seconds="0.5", collective_timeout="1.4")
    assert re.search(r"'known' .* was not submitted by rank 2 on \S+, for which ranks 0,1 have waited 0\.5", said)
    errors = [error for error in results if error]
    assert errors
    for error in errors:
        assert re.search(r"'known' .* was not submitted by rank 2 on \S+, for which ranks 0,1 have waited 1\.4", error)
        assert "SPARKVOD_COLLECTIVE_TIMEOUT" in error


def stand_still_inside(stops: int) -> float:
    """Rank ``LATE`` is stopped a while after it has begun a collective that takes long."""
    basics.init()
    engine, count = basics.engine(), 16 << 20
    memory = engine.allocate(4 * count)
    value = ctypes.c_float.from_address(memory.address + 4 * count - 4)
    value.value = 1.0
    for _ in range(stops):
        _allreduce("all are here")
        handle = engine.allreduce("large", memory.address, memory.address, count, 8, 1)
        if basics.rank() == LATE:
            time.sleep(0.03)
            pid = os.getpid()
            with subprocess.Popen(["sh", "-c", f"kill -STOP {pid}; sleep 1.6; kill -CONT {pid}"]):
                engine.wait(handle)
        engine.wait(handle)
        engine.release(handle)
    return value.value


@pytest.mark.timeout(90)
def test_a_rank_that_stands_still_inside_a_collective_is_warned_of(
    capfd: pytest.CaptureFixture[str], no_leaks: None
) -> None:
    # On a machine with much to do the stop may come before the beginning; hardly twice.
    knobs = {"SPARKVOD_STALL_CHECK_TIME_SECONDS": "0.4", "SPARKVOD_TRANSPORT": "tcp"}
    sums = sparkvod.run_local(stand_still_inside, (2,), np=SIZE, env=knobs, verbose=1, timeout=60)
    said = capfd.readouterr().err
    # Nobody fails, and the world goes on.
    assert sums == [float(SIZE**2)] * SIZE
    # It has submitted, so that nothing is missing; one that waits for a rank that waits for it says so.
    assert "was not submitted" not in said
    warned = re.findall(r"\[(\d)\]<stderr>.* waited 0\.4 s for (.*) in (.*); it is stopped or far behind", said)
    assert warned, said
    assert all(rank != str(LATE) for rank, _, _ in warned), said
    assert any(f"rank {LATE} on" in whom and "allreduce of 'large'" in what for _, whom, what in warned), said
