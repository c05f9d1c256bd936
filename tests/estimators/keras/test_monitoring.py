"""What Keras's callbacks watch and need: wrong names and missing packages show before anything starts."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from sparkvod.errors import DataError
from tests.estimators.backends import Never, write

keras = pytest.importorskip("keras", reason="the Keras estimator needs keras")
pytest.importorskip(keras.backend.backend(), reason="Keras needs its backend")

from sparkvod.estimators import KerasEstimator  # noqa: E402

callbacks = keras.callbacks


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Any]:
    numbers = np.arange(8, dtype="float32")
    columns = {"x": np.stack([numbers, numbers], 1), "y": numbers}
    return {held: write(tmp_path_factory.mktemp("store"), validation=held, **columns) for held in (False, True)}


class Adds(callbacks.Callback):
    """A callback of the user's own that adds a figure."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["mine"] = 1.0


class Sums(callbacks.EarlyStopping):
    """Watches what it makes of the figures."""

    def get_monitor_value(self, logs: Any) -> Any:
        return logs["loss"] + logs["val_loss"]


class Quiet(callbacks.TensorBoard):
    """Writes nothing."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        return None


def fit(stores: dict[bool, Any], found: list[Any], validated: bool = True, **params: Any) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    options = {"metrics": ["mae"], "feature_cols": ["x"], "label_cols": ["y"], "optimizer": "sgd", "loss": "mse"}
    options |= {"model": model, "backend": Never(1), "store": stores[validated], "callbacks": found, "verbose": 0}
    KerasEstimator(**{**options, **params}).fit_on_parquet()


@pytest.mark.parametrize(
    ("callback", "validated", "error", "words"),
    [
        (
            callbacks.EarlyStopping("val_acc"),
            True,
            DataError,
            "EarlyStopping of 'val_acc'.* squares, val_loss",
        ),
        (
            callbacks.EarlyStopping("acc", mode="max"),
            True,
            DataError,
            "EarlyStopping of 'acc' was found",
        ),
        (
            callbacks.EarlyStopping(),
            False,
            ValueError,
            "'val_loss' was found in callbacks without",
        ),
        (callbacks.ReduceLROnPlateau("val_mea"), True, DataError, "ReduceLROnPlateau of 'val_mea' was found"),
        (callbacks.ModelCheckpoint("m.keras", "f1", save_best_only=True), True, DataError, "ModelCheckpoint of 'f1'"),
        (callbacks.ModelCheckpoint("{epoch}-{vloss:.2f}.keras"), True, DataError, "ModelCheckpoint of 'vloss'"),
        (callbacks.ModelCheckpoint("{val_loss:.2f}.keras"), False, ValueError, "of 'val_loss' was found in callbacks"),
        (callbacks.EarlyStopping("squares"), True, ValueError, "Keras does not know whether more is better"),
    ],
)
def test_what_no_epoch_has(stores: Any, callback: Any, validated: bool, error: type[Exception], words: str) -> None:
    def squares(y: Any, p: Any) -> Any:
        return keras.ops.square(y - p)

    with pytest.raises(error, match=words):
        fit(stores, [callback], validated, metrics=["mae", squares])


def test_what_there_is(stores: Any) -> None:
    good = [
        callbacks.EarlyStopping("val_mae"),
        callbacks.ReduceLROnPlateau("loss"),
        callbacks.ModelCheckpoint("{epoch:02d}-{val_loss:.2f}.keras"),
        callbacks.EarlyStopping("learning_rate", mode="min"),
        Adds(),
        callbacks.EarlyStopping("mine", mode="max"),
    ]
    with pytest.raises(AssertionError, match="training was started"):
        fit(stores, good)
    adds = callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(mine=1.0))
    for found in ([adds, callbacks.EarlyStopping("mine", mode="max")], [Sums("both", mode="min")]):
        with pytest.raises(AssertionError, match="training was started"):
            fit(stores, found)
    with pytest.raises(AssertionError, match="training was started"):
        fit(stores, [callbacks.ModelCheckpoint("last.keras")], validated=False)


def test_packages(stores: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    hidden = ("tensorboard", "requests")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in hidden else find(name, *rest))
    with pytest.raises(ImportError, match=r"TensorBoard was found.*`pip install tensorboard"):
        fit(stores, [callbacks.TensorBoard("logs")])
    with pytest.raises(ImportError, match=r"RemoteMonitor was found.*`pip install requests`"):
        fit(stores, [callbacks.RemoteMonitor()])
    with pytest.raises(AssertionError, match="training was started"):
        fit(stores, [Quiet("logs")])
