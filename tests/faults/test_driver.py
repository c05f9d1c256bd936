"""A driver that is killed in mid-epoch leaves nothing behind, and goes on by its ``run_id``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("sparkvod._native", reason="the engine is not built")
pytest.importorskip("torch", reason="PyTorch is not installed")
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("driver_script.py")


def start(folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )


def steps(folder: Path) -> list[tuple[int, int]]:
    file = folder / "steps"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(int(line.split()[0]), int(line.split()[1])) for line in lines]


@pytest.mark.timeout(150)
def test_a_killed_driver_goes_on_where_it_was(tmp_path: Path, fault_table: list[tuple[str, str, str, str]]) -> None:
    driver = start(tmp_path)
    below: list[psutil.Process] = []
    try:
        until = time.monotonic() + 70
        while (1, 5) not in steps(tmp_path):
            assert driver.poll() is None, driver.stderr and driver.stderr.read()[-4000:]
            assert time.monotonic() < until
            time.sleep(0.05)
        below = psutil.Process(driver.pid).children(recursive=True)
    finally:
        driver.send_signal(signal.SIGKILL)
        at = time.monotonic()
        driver.wait()
    ranks = {int(path.name.split("-")[2]) for path in tmp_path.glob("pid-*")}
    assert ranks <= {process.pid for process in below}
    ended: list[float] = []  # of the workers
    _, alive = psutil.wait_procs(
        below, timeout=10, callback=lambda p: ended.append(time.monotonic() - at) if p.pid in ranks else None
    )
    assert not alive, "processes outlive their driver"
    assert len(ended) == len(ranks) == 2
    gone = " ".join(f"{seconds:.2f}" for seconds in sorted(ended))
    fault_table.append(("the driver is killed (SIGKILL)", gone, "-", "its workers ended; a second driver went on"))
    assert max(ended) < 3
    seen = len(steps(tmp_path))
    assert seen < 3 * 19, "the run had ended before its driver was killed"

    (tmp_path / "killed").write_text("")
    again = start(tmp_path)
    try:
        _, said = again.communicate(timeout=100)
    finally:
        again.kill()
        again.wait()
    assert again.returncode == 0, said[-4000:]
    first = steps(tmp_path)[seen]
    assert first[0] == 1, f"the second driver began with epoch {first[0]}, the checkpoint was of epoch 1"
    assert first[1] >= 3, f"the second driver began with step {first[1]}, the checkpoint was of step 3 or later"
    assert (tmp_path / "same").read_text() == "True", "other weights than those of an unbroken run"
