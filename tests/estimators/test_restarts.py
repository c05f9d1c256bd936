"""Going on after a lost rank, and the checkpoints that make it possible."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkvod.data import FilesystemStore, Store
from sparkvod.errors import LaunchError, StoreError, WorkerError, WorkerLostError
from sparkvod.estimators.checkpoint import path_of
from sparkvod.launch.local import LocalLauncher
from tests.contracts.estimator import Interrupt
from tests.estimators.backends import Here, write

torch = pytest.importorskip("torch", reason="the PyTorch estimator needs torch")
ROOT = Path(__file__).resolve().parents[2]


class Failing(Here):
    """Fails with these errors, one per run, then works."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.runs = list(errors), 0

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> list[Any]:
        self.runs += 1
        if self.errors:
            raise self.errors.pop(0)
        return super().run(fn, args, kwargs, env)


@pytest.fixture
def store(tmp_path: Path) -> FilesystemStore:
    x = np.random.default_rng(1).normal(size=(200, 3)).astype("float32")
    return write(tmp_path / "store", x=x, y=x.sum(axis=1))


def fit(store: FilesystemStore, backend: Any, **params: Any) -> Any:
    from sparkvod.estimators import TorchEstimator

    torch.manual_seed(5)
    net = torch.nn.Linear(3, 1)
    options = {"model": net, "optimizer": torch.optim.Adam(net.parameters(), lr=0.01), "loss": torch.nn.MSELoss()}
    options |= {"batch_size": 10, "epochs": 2, "random_seed": 1, "verbose": 0, **params}
    made = TorchEstimator(feature_cols=["x"], label_cols=["y"], store=store, backend=backend, **options)
    return made.fit_on_parquet()


def lost() -> WorkerLostError:
    return WorkerLostError(1, "there", "was killed by SIGKILL")


def raised() -> WorkerError:
    return WorkerError(1, "there", "ValueError", "mine", "...")


def test_a_lost_rank_is_worth_a_restart(store: FilesystemStore, caplog: pytest.LogCaptureFixture) -> None:
    backend = Failing(lost(), lost())
    assert len(fit(store, backend, max_restarts=2).getHistory()) == 2
    assert backend.runs == 3
    said = [record.getMessage() for record in caplog.records if "starts again" in record.getMessage()]
    assert len(said) == 2
    assert "restart 2 of 2, because it lost a rank: rank 1 on there was lost" in said[1]


@pytest.mark.parametrize("restarts", [0, 1])
def test_restarts_end(store: FilesystemStore, restarts: int) -> None:
    backend = Failing(*[lost() for _ in range(5)])
    with pytest.raises(WorkerLostError):
        fit(store, backend, max_restarts=restarts)
    assert backend.runs == 1 + restarts


def test_an_exception_of_the_users_is_not(store: FilesystemStore) -> None:
    for errors, runs in (([raised()], 1), ([lost(), raised()], 2)):
        backend = Failing(*errors)
        with pytest.raises(WorkerError, match="ValueError"):
            fit(store, backend, max_restarts=5)
        assert backend.runs == runs


def test_a_restart_that_gets_no_slots_says_why_there_was_one(store: FilesystemStore) -> None:
    with pytest.raises(LaunchError, match="no slots") as caught:
        fit(store, Failing(lost(), LaunchError("no slots")), max_restarts=5)
    assert isinstance(caught.value.__cause__, WorkerLostError)


def checkpoints(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that grows with each checkpoint written in this process."""
    written: list[str] = []
    original = FilesystemStore.write_bytes

    def write_bytes(self: FilesystemStore, path: str, data: bytes) -> None:
        written.append(path)
        original(self, path, data)

    monkeypatch.setattr(FilesystemStore, "write_bytes", write_bytes)
    return written


@pytest.mark.parametrize(("seconds", "count"), [(None, 2), (1e-6, 20), (3600.0, 2)])
def test_checkpoints_by_the_clock(
    store: FilesystemStore, monkeypatch: pytest.MonkeyPatch, seconds: float | None, count: int
) -> None:
    written = checkpoints(monkeypatch)
    fit(store, Here(), checkpoint_seconds=seconds, run_id="run")
    # 2 epochs of 20 steps; within an epoch a step's clock speaks one step later, and saving makes the next one young
    assert count <= len([path for path in written if "/runs/run" in path]) <= 2 * count


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("no_leaks")
def test_two_ranks_agree_on_the_clock_and_go_on_in_mid_epoch(store: FilesystemStore, tmp_path: Path) -> None:
    backend = LocalLauncher(2, verbose=0, timeout=100)
    options = {"checkpoint_seconds": 1e-6, "run_id": "broken"}
    interrupt = Interrupt(tmp_path / "interrupted", epoch=1, step=5)
    with pytest.raises(WorkerError, match="interrupted by the test"):
        fit(store, backend, callbacks=[interrupt], max_restarts=3, **options)
    broken = fit(store, backend, **options)
    whole = fit(store, backend, run_id="whole")
    for a, b in zip(broken.getModel().parameters(), whole.getModel().parameters(), strict=True):
        assert torch.equal(a, b)
    assert sum(worker["rows"] for worker in broken.workers) < 200  # in mid-epoch, not from its beginning


WRITER = """
import sys
from sparkvod.data import Store
store = Store.create(sys.argv[1])
parts = [bytes([65 + k]) * (4 << 20) for k in range(2)]
print("ready", flush=True)
number = 0
while True:
    store.write_bytes(sys.argv[2], parts[number % 2])
    number += 1
"""


@pytest.mark.timeout(60)
def test_a_writer_that_is_killed_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path))
    path = path_of(store, "run")
    assert path is not None
    for seconds in (0.05, 0.08, 0.13):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), path], stdout=subprocess.PIPE, cwd=ROOT, text=True
        )
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            while not store.exists(path):
                time.sleep(0.001)
            time.sleep(seconds)
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
        content = store.read(path)
        assert len(content) == 4 << 20
        assert len(set(content)) == 1


def test_a_half_written_checkpoint_is_never_loaded(store: FilesystemStore) -> None:
    whole = fit(store, Here(), run_id="run", epochs=1)
    path = path_of(store, "run")
    assert path is not None
    content = store.read(path)
    # what a writer that was killed leaves beside the file is not looked at
    Path(f"{path}.0123abcd.tmp").write_bytes(content[: len(content) // 2])
    assert fit(store, Here(), run_id="run", epochs=1).getHistory() == whole.getHistory()
    # on a file system that shows a file while it is written, half of one is refused, not loaded and not skipped
    for size in (0, 100, len(content) // 2, len(content) - 1):
        Path(path).write_bytes(content[:size])
        with pytest.raises((StoreError, WorkerError), match="no whole checkpoint"):
            fit(store, Here(), run_id="run", epochs=2)


def test_what_changed_under_the_same_run_id_is_named(store: FilesystemStore, tmp_path: Path) -> None:
    fit(store, Here(), run_id="run", epochs=1)
    with pytest.raises(ValueError, match="batch_size is 20 and was 10"):
        fit(store, Here(), run_id="run", batch_size=20)
    with pytest.raises(ValueError, match="optimizer.* is .*SGD.* and was .*Adam"):
        fit(store, Here(), run_id="run", optimizer=torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.01))
    other = torch.nn.Linear(3, 1, bias=False)
    with pytest.raises(ValueError, match="model.bias is None and was "):
        fit(store, Here(), run_id="run", model=other, optimizer=torch.optim.Adam(other.parameters(), lr=0.01))
    x = np.random.default_rng(2).normal(size=(210, 3)).astype("float32")
    changed = write(tmp_path / "other", x=x, y=x.sum(axis=1))
    target, origin = path_of(changed, "run"), path_of(store, "run")
    assert target is not None
    assert origin is not None
    changed.write_bytes(target, store.read(origin))
    with pytest.raises(ValueError, match="data is .* and was "):
        fit(changed, Here(), run_id="run")
    # the bookkeeping of failures is free to change
    fit(store, Here(), run_id="run", max_restarts=2, checkpoint_seconds=60, checkpoint_every=7)


def test_seconds_are_checked() -> None:
    from sparkvod.estimators import TorchEstimator

    for value, error in (("30s", TypeError), (0, ValueError), (True, TypeError), (-1.0, ValueError)):
        with pytest.raises(error, match="a number of seconds above 0 was expected"):
            TorchEstimator(checkpoint_seconds=value)
    assert TorchEstimator(checkpoint_seconds=30).getCheckpointSeconds() == 30.0
    assert TorchEstimator().getMaxRestarts() == 0
