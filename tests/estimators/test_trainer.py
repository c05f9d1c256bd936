"""The training loop that all frameworks share, seen through the PyTorch estimator."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkvod.errors import DataError, WorkerError
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


class Spoil(Callback):
    """Makes the loss infinite on rank 1 in one step: that step's gradients spoil the weights of all ranks."""

    def __init__(self, epoch: int, step: int) -> None:
        self.at = epoch, step

    def on_batch_begin(self, trainer: Any, epoch: int, step: int) -> None:
        if (epoch, step) == self.at and trainer.rank == trainer.size - 1:
            with torch.no_grad():
                trainer.model.weight.fill_(float("inf"))


@pytest.mark.timeout(120)
def test_a_loss_that_is_not_finite_is_warned_of_once_or_ends_the_run(tmp_path: Path, caplog: Any) -> None:
    backend = LocalLauncher(2, verbose=0)
    estimator = make(tmp_path, backend=backend, epochs=4, batch_size=None, global_batch_size=16, random_seed=1)
    estimator.setCallbacks([Spoil(1, 2)])
    logging.getLogger("sparkvod").propagate = True
    with caplog.at_level(logging.WARNING, "sparkvod"):
        found = estimator.fit_on_parquet()
    assert len(found.getHistory()) == 4
    said = [r.getMessage() for r in caplog.records if "NaN or infinite" in r.getMessage()]
    assert len(said) == 1
    assert "the training loss became NaN or infinite in epoch 1, step 2: lower the learning rate" in said[0]
    words = "the training loss became NaN or infinite in epoch 1, step 2, and terminate_on_nan=True ends the run"
    with pytest.raises(WorkerError, match=words) as caught:
        estimator.setTerminateOnNan(True).setParams(run_id="a", checkpoint_every=1).fit_on_parquet()
    assert isinstance(caught.value.__cause__, FloatingPointError)
    # No checkpoint holds the spoilt weights: the run goes on from the last step that was sound.
    again = estimator.setCallbacks([]).fit_on_parquet()
    assert all(np.isfinite(record["train"]["loss"]) for record in again.getHistory())


@pytest.mark.timeout(120)
def test_any_number_of_ranks_gives_the_same_model_at_one_global_batch(tmp_path: Path) -> None:
    found = {}
    for ranks, rows in ((1, 20), (3, 20)):  # 20 rows among 3 ranks, and 64 rows in steps of 20
        backend = Here() if ranks == 1 else LocalLauncher(ranks, verbose=0)
        torch.manual_seed(0)
        estimator = make(tmp_path / str(ranks), backend=backend, batch_size=None, global_batch_size=rows, random_seed=1)
        found[ranks] = estimator.setValidation(0.2).setEpochs(2).fit_on_parquet()
    assert found[3].workers[0]["rows"] + found[3].workers[1]["rows"] + found[3].workers[2]["rows"] == 2 * 64
    for mine, expected in zip(found[3].getModel().parameters(), found[1].getModel().parameters(), strict=True):
        torch.testing.assert_close(mine, expected)


def test_no_epochs_prepare_check_and_return_the_model(tmp_path: Path) -> None:
    estimator = make(tmp_path, backend=Here(), epochs=0)
    found = estimator.fit_on_parquet()
    assert found.getHistory() == []
    for mine, given in zip(found.getModel().parameters(), estimator.getModel().parameters(), strict=True):
        assert torch.equal(mine, given)
    with pytest.raises(DataError, match="'nothing'"):
        estimator.setFeatureCols(["nothing"]).fit_on_parquet()
