"""Metrics of the user's own: those that do not add up are refused on the driver, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.estimators.backends import Here, write

keras = pytest.importorskip("keras", reason="the Keras estimator needs keras")
pytest.importorskip(keras.backend.backend(), reason="Keras needs its backend")

from sparkvod.errors import DataError  # noqa: E402
from sparkvod.estimators import KerasEstimator  # noqa: E402

ops = keras.ops


class Kept(keras.metrics.Metric):
    """Keeps one number."""

    begin = 0.0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kept = self.add_weight(shape=(), initializer=keras.initializers.Constant(self.begin), name="kept")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        errors = ops.abs(ops.cast(y_true, "float32") - y_pred)
        self.kept.assign(self.next(self.kept, errors))

    def result(self) -> Any:
        return self.kept


class Largest(Kept):
    def next(self, kept: Any, errors: Any) -> Any:
        return ops.maximum(kept, ops.max(errors))


class Smallest(Kept):
    begin = float("inf")

    def next(self, kept: Any, errors: Any) -> Any:
        return ops.minimum(kept, ops.min(errors))

    def reset_state(self) -> None:
        self.kept.assign(self.begin)


class Latest(Kept):
    def next(self, kept: Any, errors: Any) -> Any:
        return ops.mean(errors)


class FromOne(Kept):
    begin = 1.0

    def next(self, kept: Any, errors: Any) -> Any:
        return kept + ops.sum(errors)

    def reset_state(self) -> None:
        self.kept.assign(self.begin)


class Total(Kept):
    def next(self, kept: Any, errors: Any) -> Any:
        return kept + ops.sum(errors)


class Within(keras.Model):
    """Measures in its call what no sum is."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.last, self.largest = keras.layers.Dense(1, bias_initializer="ones"), Largest(name="own")

    def call(self, x: Any) -> Any:
        found = self.last(x)
        self.largest.update_state(0.0, found)
        return found


def network() -> Any:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, activation="softmax")])


def planned(folder: Path, model: Any, label: str, loss: Any, metrics: list[Any], **params: Any) -> None:
    """Does all that the driver does before ranks start."""
    x = np.ones((20, 2), "float32")
    k = np.arange(20) % 3
    store = write(folder / "store", x=x, y=x[:, 0], k=k, one_hot=np.eye(3, dtype="float32")[k])
    estimator = KerasEstimator(
        **{"model": model, "optimizer": "sgd", "loss": loss, "metrics": metrics, "feature_cols": ["x"]},
        **{"label_cols": [label], "store": store, "backend": Here(), "verbose": 0, **params},
    )
    from sparkvod.data import open_prepared

    data = open_prepared(store, None)
    estimator._plan(estimator._pack(), [data.column("x")], [data.column(label)])


@pytest.mark.parametrize("cls", [Largest, Smallest, Latest, FromOne])
def test_what_is_no_sum(tmp_path: Path, cls: Any) -> None:
    with pytest.raises(DataError, match=rf"the metric 'own' \({cls.__name__}\) was found, whose variable 'kept' is"):
        planned(tmp_path, network(), "one_hot", "mse", ["mae", Total(name="total"), cls(name="own")])


def test_what_is_measured_in_the_models_call(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the metric 'own' \(Largest\)"):
        planned(tmp_path, Within(), "y", "mse", [])


class Precise(keras.metrics.Precision):
    """One of Keras's that somebody has derived from."""


class Certain(keras.metrics.AUC):
    """Another."""


def test_sums_are_taken(tmp_path: Path) -> None:
    own = [Total(), Precise(), Certain(multi_label=True, num_labels=3)]
    planned(tmp_path / "a", network(), "one_hot", "categorical_crossentropy", own, sample_weight_col="y")
    accurate = type("Accurate", (keras.metrics.SparseCategoricalAccuracy,), {"__module__": __name__})
    planned(tmp_path / "b", network(), "k", "sparse_categorical_crossentropy", [accurate()])
