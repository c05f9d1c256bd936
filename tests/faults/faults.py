"""Faults that a rank does to itself in mid-epoch, the notes that the ranks leave, and a training to do it in."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from sparkvod.estimators.callbacks import Callback

AT = (1, 4)  # epoch and step


class Fault(Callback):
    """Does ``how`` on one rank, once, and notes when; every rank notes its process, and when and how it ended."""

    def __init__(self, folder: Path, how: str, rank: int = 1) -> None:
        self.folder, self.how, self.rank = folder, how, rank

    def on_train_begin(self, trainer: Any) -> None:
        from sparkvod.launch import context

        rank, folder = trainer.rank, self.folder
        (folder / f"pid-{rank}-{os.getpid()}").write_text("")

        def ended(error: BaseException | None) -> None:
            if error is not None:
                note = {"time": time.time(), "kind": type(error).__name__, "message": str(error)}
                (folder / f"error-{rank}").write_text(json.dumps(note))

        context.on_exit(ended)

    def on_batch_end(self, trainer: Any, epoch: int, step: int) -> None:
        done = self.folder / "fault"
        if trainer.rank != self.rank or (epoch, step) != AT or done.exists():
            return
        done.write_text(repr(time.time()))
        if self.how == "raise":
            raise ArithmeticError("raised by the test")
        if self.how == "exit":
            os._exit(3)
        if self.how == "executor":
            os.kill(executor(), signal.SIGKILL)
            time.sleep(60)
        os.kill(os.getpid(), signal.SIGKILL if self.how == "kill" else signal.SIGSTOP)


def executor() -> int:
    """Returns the process of the executor that started this Python worker."""
    import psutil

    process = psutil.Process().parent()
    while process is not None and "java" not in process.name():
        process = process.parent()
    assert process is not None
    return int(process.pid)


def fault_time(folder: Path) -> float:
    """Returns when the fault happened."""
    return float((folder / "fault").read_text())


def errors(folder: Path) -> dict[int, dict[str, Any]]:
    """Returns by rank what each rank that saw an error noted of it."""
    return {int(path.name.split("-")[1]): json.loads(path.read_text()) for path in folder.glob("error-*")}


def of_rank(folder: Path, rank: int) -> list[int]:
    """Returns the processes that one rank has run in."""
    return [int(path.name.split("-")[2]) for path in folder.glob(f"pid-{rank}-*")]


def busy(folder: Path) -> list[int]:
    """Returns the ranks' processes that still hold something of the engine or stand still."""
    left = []
    for path in folder.glob("pid-*"):
        pid = int(path.name.split("-")[2])
        try:
            links = [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state in "Tt" or any("memfd:" in link for link in links):
            left.append(pid)
    return left


def await_none_busy(folder: Path, seconds: float = 8.0) -> list[int]:
    """Waits until nothing of the ranks is left; returns what is."""
    until = time.monotonic() + seconds
    while (left := busy(folder)) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def frame(spark: Any) -> Any:
    """Returns 600 rows: two features and a label."""
    return spark.range(0, 600, 1, 2).selectExpr(
        "float(sin(id * 0.7)) as a", "float(cos(id * 1.3)) as b", "double(sin(id * 0.7) + 2 * cos(id * 1.3)) as y"
    )


def fit(df: Any, store: Path, **params: Any) -> bytes:
    """Trains a small network with dropout, and returns its weights."""
    import torch

    from sparkvod.estimators import TorchEstimator

    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    options = {"batch_size": 16, "epochs": 3, "random_seed": 3, "store": str(store), "verbose": 0, **params}
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    made = TorchEstimator(
        model=net, optimizer=optimizer, loss=torch.nn.MSELoss(), feature_cols=["a", "b"], label_cols=["y"], **options
    )
    weights = [p.detach().ravel() for p in made.fit(df).getModel().parameters()]
    return bytes(torch.cat(weights).numpy().tobytes())
