"""Callbacks of Keras around the validation, beside Keras's own fit over the same rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.estimators.backends import Here, write

keras = pytest.importorskip("keras", reason="the Keras estimator needs keras")
pytest.importorskip(keras.backend.backend(), reason="Keras needs its backend")

from sparkvod.estimators import Callback, KerasEstimator  # noqa: E402
from sparkvod.keras.callbacks import BestModelCheckpoint  # noqa: E402

ROWS, EPOCHS = 60, 4
X = np.random.default_rng(5).standard_normal((ROWS, 3)).astype("float32")
Y = (X @ np.array([1, -2, 0.5]) + 0.3).astype("float32")


class Noted(keras.callbacks.Callback):
    """Notes the hooks around the validation, and the figures that come with them."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def note(self, hook: str, logs: Any = None) -> None:
        with self.file.open("a") as lines:
            lines.write(
                json.dumps([hook, {name: round(float(value), 5) for name, value in (logs or {}).items()}]) + "\n"
            )

    def on_train_begin(self, logs: Any = None) -> None:
        self.file.write_text("")

    def on_test_begin(self, logs: Any = None) -> None:
        self.note("begin", logs)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.note(f"batch {batch}", logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note(f"batch {batch} ended", logs)

    def on_test_end(self, logs: Any = None) -> None:
        self.note("end", logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.note(f"epoch {epoch}", logs)

    def notes(self) -> list[Any]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]


@pytest.mark.parametrize("on_epoch", [False, True])
def test_the_validation_is_of_averaged_weights(tmp_path: Path, on_epoch: bool) -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())

    def optimizer() -> Any:
        return keras.optimizers.SGD(0.2, use_ema=True, ema_momentum=0.8)

    def callbacks(noted: Noted) -> list[Any]:
        return [keras.callbacks.SwapEMAWeights(swap_on_epoch=on_epoch), noted]

    theirs, mine = Noted(tmp_path / "keras"), Noted(tmp_path / "sparkvod")
    best = keras.callbacks.ModelCheckpoint(tmp_path / "best.weights.h5", save_best_only=True, save_weights_only=True)
    options = {"batch_size": ROWS, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    copy.compile(optimizer(), "mse", metrics=["mae"])
    copy.fit(X, Y, **options, validation_data=(X, Y), validation_batch_size=40, callbacks=[*callbacks(theirs), best])
    copy.load_weights(tmp_path / "best.weights.h5")
    estimator = KerasEstimator(
        **{"model": model, "optimizer": optimizer(), "loss": "mse", "metrics": ["mae"], "epochs": EPOCHS},
        **{"batch_size": ROWS, "val_batch_size": 40, "feature_cols": ["x"], "label_cols": ["y"], "verbose": 0},
        **{"store": write(tmp_path / "store", validation=True, x=X, y=Y), "backend": Here(), "random_seed": 0},
        callbacks=callbacks(mine),
        checkpoint_callback=BestModelCheckpoint(),
    )
    found = estimator.fit_on_parquet()
    assert [hook for hook, _ in mine.notes()] == [hook for hook, _ in theirs.notes()]
    for (hook, logs), (_, expected) in zip(mine.notes(), theirs.notes(), strict=True):
        assert set(logs) == set(expected), hook
        if "batch 0" not in hook:  # which rows are in it is the reader's choice
            assert logs == pytest.approx(expected, rel=1e-4, abs=2e-5), hook
    losses = [record["validation"]["loss"] for record in found.getHistory()]
    assert losses[-1] > 1.5 * found.getHistory()[-1]["train"]["loss"]  # averages lag behind
    for weight, expected in zip(found.getModel().get_weights(), copy.get_weights(), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-4, atol=1e-5)


class Compared(Callback):
    """Notes which weights the ranks compare."""

    found: list[str] = []

    def on_train_begin(self, trainer: Any) -> None:
        self.found += [name.rpartition("/")[2] for name, _ in trainer.adapter.replicas()]


def test_the_ranks_compare_what_is_trained(tmp_path: Path) -> None:
    """Not the statistics that each rank has of its own rows: a run that goes on within an epoch has other ones."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    Compared.found.clear()
    KerasEstimator(
        **{"model": model, "optimizer": "sgd", "loss": "mse", "feature_cols": ["x"], "label_cols": ["y"]},
        **{"store": write(tmp_path / "store", x=X, y=Y), "backend": Here(), "callbacks": [Compared()], "verbose": 0},
    ).fit_on_parquet()
    assert Compared.found == ["gamma", "beta", "kernel", "bias"]
