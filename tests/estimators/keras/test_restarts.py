"""A rank that is killed while TensorFlow or PyTorch waits for it is told from one that raised."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkvod.estimators import Callback
from sparkvod.launch.local import LocalLauncher
from tests.estimators.backends import write

keras = pytest.importorskip("keras", reason="the Keras estimator needs keras")
pytest.importorskip(keras.backend.backend(), reason="Keras needs its backend")


class Killed(Callback):
    """Kills rank 1, once."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_batch_end(self, trainer: Any, epoch: int, step: int) -> None:
        if trainer.rank == 1 and (epoch, step) == (1, 3) and not self.file.exists():
            self.file.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(170)
def test_a_lost_rank_is_started_again(tmp_path: Path, leave_to_full: Callable[[str], None]) -> None:
    leave_to_full("restarts are tested with TorchEstimator, and this takes four imports of TensorFlow")
    from sparkvod.estimators import KerasEstimator

    x = np.random.default_rng(1).normal(size=(200, 3)).astype("float32")
    store = write(tmp_path / "store", x=x, y=x.sum(axis=1))
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
    )
    found = KerasEstimator(
        model=model,
        optimizer=keras.optimizers.Adam(0.01),
        loss="mse",
        feature_cols=["x"],
        label_cols=["y"],
        store=store,
        backend=LocalLauncher(2, verbose=0),
        callbacks=[Killed(tmp_path / "killed")],
        batch_size=10,
        epochs=3,
        max_restarts=1,
        random_seed=1,
        verbose=0,
    ).fit_on_parquet()
    assert (tmp_path / "killed").exists()
    assert [record["epoch"] for record in found.getHistory()] == [0, 1, 2]
    assert all(record["rows"] == 200 for record in found.getHistory() if record["epoch"] != 1)
