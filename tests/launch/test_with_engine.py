"""The launchers with the engine: worlds meet, and a rank that fails in mid-collective ends everything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from sparkvod.errors import WorkerError, WorkerLostError
from sparkvod.launch.launcher import Launcher
from sparkvod.launch.local import LocalLauncher
from sparkvod.launch.spark import SparkLauncher
from tests.launch.worlds import free_port

pytest.importorskip("sparkvod._native", reason="the engine is not built")
pytestmark = [pytest.mark.timeout(150), pytest.mark.usefixtures("no_leaks")]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["local", "spark"])
def launcher(request: pytest.FixtureRequest) -> Launcher:
    if request.param == "local":
        return LocalLauncher(2, timeout=120)
    request.getfixturevalue("spark")
    return SparkLauncher(2)


def summed(times: int = 1) -> list[float]:
    from sparkvod.core import basics, objects  # no framework, whose import takes each rank seconds

    results = []
    for _ in range(times):
        basics.init()
        results.append(sum(objects.allgather_object(basics.rank() + 1.0)))
        basics.shutdown()
    return results


def fails_in_mid_collective(how: str) -> None:
    from sparkvod.core import basics, objects

    basics.init()
    objects.allgather_object("first")
    if basics.rank() == 1:
        time.sleep(0.3)
        if how == "raise":
            raise ValueError("in mid-epoch", time.time())
        os.kill(os.getpid(), signal.SIGKILL)
    objects.allgather_object("second")


def engine_descriptors() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if "memfd" in target and "sparkvod" in target:
            found.append(target)
    return found


def test_worlds_meet_again_and_again(launcher: Launcher) -> None:
    assert launcher.run(summed, (3,)) == [[3.0] * 3] * 2


def test_a_rank_that_raises_in_mid_epoch_is_the_error(launcher: Launcher) -> None:
    with pytest.raises(WorkerError, match="rank 1 on .* raised ValueError: .'in mid-epoch'") as caught:
        launcher.run(fails_in_mid_collective, ("raise",))
    assert isinstance(caught.value.__cause__, ValueError)
    assert time.time() - caught.value.__cause__.args[1] < 3
    assert launcher.run(summed) == [[3.0]] * 2
    assert launcher.run(engine_descriptors) == [[], []]


def test_a_rank_that_is_killed_in_mid_epoch_is_the_error(launcher: Launcher) -> None:
    with pytest.raises(WorkerLostError, match="rank 1 on ") as caught:
        launcher.run(fails_in_mid_collective, ("kill",))
    assert caught.value.lost_peer
    assert launcher.run(summed) == [[3.0]] * 2


SCRIPT = """
from sparkvod.core import basics, objects
basics.init()
total = sum(objects.allgather_object(basics.rank() + 1.0))
print(f"rank {basics.rank()} of {basics.size()} has {total}\\n", end="")
basics.shutdown()
basics.init()
assert sum(objects.allgather_object(1)) == basics.size()
"""
TORCH_SCRIPT = textwrap.dedent(
    """
    import torch
    import sparkvod.torch as hvd
    hvd.init()
    total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum)
    print(f"rank {hvd.rank()} of {hvd.size()} has {float(total[0])}\\n", end="")
    hvd.shutdown()
    hvd.init()
    assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)[0]) == hvd.size()
    """
)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_script_that_anybody_starts(size: int, tmp_path: Path) -> None:
    script, secret = tmp_path / "script.py", tmp_path / "secret"
    script.write_text(SCRIPT)
    secret.write_bytes(os.urandom(16).hex().encode())
    secret.chmod(0o600)
    address = f"127.0.0.1:{free_port()}"
    processes: list[Any] = []
    try:
        for rank in range(size):
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            if size > 1:
                environment |= {"SPARKVOD_RANK": str(rank), "SPARKVOD_SIZE": str(size)}
                environment |= {"SPARKVOD_RENDEZVOUS": address, "SPARKVOD_SECRET_FILE": str(secret)}
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(script)],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        outputs = [process.communicate(timeout=100)[0].strip() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    total = float(sum(range(1, size + 1)))
    assert outputs == [f"rank {rank} of {size} has {total}" for rank in range(size)]


def test_a_script_that_torchrun_starts(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    script = tmp_path / "script.py"
    script.write_text(TORCH_SCRIPT)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            f"--master-port={free_port()}",
            str(script),
        ],
        capture_output=True,
        text=True,
        timeout=140,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(done.stdout.split("\n"))[-2:] == ["rank 0 of 2 has 3.0", "rank 1 of 2 has 3.0"]
