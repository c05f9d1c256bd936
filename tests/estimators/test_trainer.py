"""The training loop that all frameworks share, seen through the PyTorch estimator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkvod.errors import WorkerError
from sparkvod.estimators import Callback, TorchEstimator, trainer
from sparkvod.launch.local import LocalLauncher
from tests.estimators.backends import Here, write

torch = pytest.importorskip("torch", reason="the estimator here is PyTorch's")


class Stop(Callback):
    """Calls ``stop()`` in one hook of one rank."""

    def __init__(self, hook: str, rank: int = 1) -> None:
        self.hook, self.rank = hook, rank

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") and name == object.__getattribute__(self, "hook"):
            return lambda trainer, *args: trainer.stop() if trainer.rank == self.rank else None
        return object.__getattribute__(self, name)


def make(tmp_path: Path, **params: Any) -> TorchEstimator:
    store = write(tmp_path / "store", row_group_size=8, x=np.ones((64, 2), "float32"), y=np.ones(64))
    model = torch.nn.Linear(2, 1)
    defaults = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loss": torch.nn.MSELoss()}
    columns = {"feature_cols": ["x"], "label_cols": ["y"]}
    return TorchEstimator(**{**defaults, **columns, "store": store, "verbose": 0, "batch_size": 8, **params})


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("hook", "epochs"),
    [("on_train_begin", 0), ("on_epoch_begin", 1), ("on_batch_end", 1), ("on_epoch_end", 1), ("on_train_end", 3)],
)
def test_one_rank_may_end_training_on_all(spark: Any, tmp_path: Path, hook: str, epochs: int) -> None:
    found = make(tmp_path, num_proc=2, epochs=3, callbacks=[Stop(hook)]).fit_on_parquet()
    assert [record["epoch"] for record in found.getHistory()] == list(range(epochs))


class Faster(Callback):
    """Raises the learning rate on rank 1."""

    def on_epoch_end(self, trainer: Any, epoch: int, record: dict[str, Any]) -> None:
        if trainer.rank == 1 and epoch == 1:
            trainer.optimizer.param_groups[0]["lr"] = 0.4


@pytest.mark.timeout(60)
def test_ranks_with_learning_rates_of_their_own_are_told(tmp_path: Path) -> None:
    words = "the learning rates 0.1 on rank 0, 0.4 on rank 1 after epoch 1: all ranks must hold the same"
    with pytest.raises(WorkerError, match=words):
        make(tmp_path, backend=LocalLauncher(2, verbose=0), epochs=3, callbacks=[Faster()]).fit_on_parquet()


class Break(Callback):
    """Raises at the end of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_batch_end(self, trainer: Any, epoch: int, step: int) -> None:
        if step == self.step:
            raise RuntimeError("broken off")


@pytest.mark.parametrize(("every", "seconds"), [(3, None), (None, 1e-9)])
def test_no_gradients_are_lost_with_a_run_that_is_broken_off(tmp_path: Path, every: Any, seconds: Any) -> None:
    torch.manual_seed(0)
    common = {"backend": Here(), "random_seed": 1, "backward_passes_per_step": 2}
    unbroken = make(tmp_path, **common)
    broken = unbroken.copy().setParams(run_id="a", checkpoint_every=every, checkpoint_seconds=seconds)
    with pytest.raises(RuntimeError, match="broken off"):
        broken.copy().setCallbacks([Break(4)]).fit_on_parquet()
    steps: list[int] = []

    class Note(Callback):
        def on_batch_end(self, trainer: Any, epoch: int, step: int) -> None:
            steps.append(step)

    found = broken.setCallbacks([Note()]).fit_on_parquet().getModel()
    assert steps == [4, 5, 6, 7]  # not 3: there half of an update's gradients would have been left behind
    for mine, expected in zip(found.parameters(), unbroken.fit_on_parquet().getModel().parameters(), strict=True):
        assert torch.equal(mine, expected)


def test_the_rate_leaves_the_first_step_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 10.0, 11.0, 12.0, 13.0])
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: next(now))
    speed = trainer._Speed()
    speed.add(100)
    assert (speed.rows, speed.rate) == (100, 10.0)
    speed.add(100)
    assert speed.rate == 100.0
    speed.add(100)
    assert speed.rate == 100.0
    speed.end()
    assert (speed.rows, speed.seconds, speed.rate) == (300, 13.0, pytest.approx(200 / 3))


def test_an_epoch_of_one_step_has_a_rate(tmp_path: Path) -> None:
    (record,) = make(tmp_path, backend=Here(), batch_size=64).fit_on_parquet().getHistory()
    assert record["rows_per_second"] == pytest.approx(record["rows"] / record["seconds"])
