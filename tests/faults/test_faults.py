"""A rank that dies in mid-epoch: how soon the others and ``fit`` know, and what they say. Prints a table."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkvod.errors import WorkerError
from tests.faults import faults

pytest.importorskip("sparkvod._native", reason="the engine is not built")
pytest.importorskip("torch", reason="PyTorch is not installed")
ROOT = Path(__file__).resolve().parents[2]
KNOB = 2.0  # SPARKVOD_COLLECTIVE_TIMEOUT, seconds
NAMES = {
    "raise": "a rank raises",
    "exit": "a rank leaves by os._exit",
    "kill": "a rank is killed (SIGKILL)",
    "stop": f"a rank is stopped (time-out {KNOB:g} s)",
}
# Spark may hear of the end of a process from the others before it sees it: the rank that ended is named either way.
SAYS = {
    "raise": "rank 1 on .* raised ArithmeticError: raised by the test",
    "exit": "rank 1 on .* was lost: its process ended",
    "kill": "rank 1 on .* was lost: its process ended",
    "stop": "rank 1 on .* was waited for in vain, as rank [02] on .* noticed: CollectiveTimeoutError: ",
}


Table = list[tuple[str, str, str, str]]


def row(how: str, others: list[float], fit: float, said: str) -> tuple[str, str, str, str]:
    noticed = " ".join(f"{seconds:.2f}" for seconds in others) or "ended with it"
    return how, noticed, f"{fit:.2f}", said.splitlines()[0]


@pytest.mark.timeout(90)
@pytest.mark.parametrize("how", ["raise", "exit", "kill", "stop"])
def test_a_rank_that_dies(
    spark: Any, tmp_path: Path, fault_table: Table, leave_to_full: Callable[[str], None], how: str
) -> None:
    from sparkvod.estimators import SparkBackend

    if how == "exit":
        leave_to_full("kill shows it")
    env = {"SPARKVOD_COLLECTIVE_TIMEOUT": f"{KNOB:g}"} if how == "stop" else {}
    backend = SparkBackend(num_proc=3, env=env, verbose=0)
    with pytest.raises(WorkerError) as caught:
        faults.fit(faults.frame(spark), tmp_path / "store", backend=backend, callbacks=[faults.Fault(tmp_path, how)])
    at_fit = time.time() - faults.fault_time(tmp_path)
    others = {rank: note for rank, note in faults.errors(tmp_path).items() if rank != 1}
    noticed = sorted(note["time"] - faults.fault_time(tmp_path) for note in others.values())
    fault_table.append(row(NAMES[how], noticed, at_fit, str(caught.value)))
    knob = KNOB if how == "stop" else 0.0
    assert len(noticed) == 2
    # A frozen rank is noticed when the knob's time has passed, on a busy machine a little later.
    assert noticed[-1] < 1 + 2 * knob
    assert at_fit < 3 + 2 * knob
    assert re.search(SAYS[how], str(caught.value).splitlines()[0]), caught.value
    assert caught.value.lost_peer is (how != "raise")
    assert caught.value.rank == 1
    for note in others.values():  # whom they lost, or what it told them before it left
        assert "rank 1" in note["message"], note
    assert faults.await_none_busy(tmp_path) == []


@pytest.mark.timeout(170)
def test_an_executor_that_is_killed_costs_a_restart_and_no_bit(tmp_path: Path, fault_table: Table) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("cluster_script.py")), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=160,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads((tmp_path / "told.json").read_text())
    fault_table.append(row("an executor is killed", told["others"], told["fit"], told["error"]))
    assert told["kind"] == "WorkerLost"
    assert told["lost_peer"]
    assert all(seconds < 1 for seconds in told["others"])
    assert told["fit"] < 3
    assert told["left"] == []
    assert told["equal"], "the run that lost an executor ended in other weights than the unbroken one"
    assert told["restarts"] == 1
    pids = [int(path.name.split("-")[2]) for path in tmp_path.glob("*/pid-*")]
    assert pids
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
