"""What of the estimators' contract needs several ranks but no Spark; ``test_jax.py`` runs it where Keras is on JAX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkvod.errors import WorkerError
from sparkvod.launch.local import LocalLauncher
from tests.contracts.estimator import Interrupt
from tests.estimators.backends import Here, write

keras = pytest.importorskip("keras", reason="the Keras estimator needs keras")
pytest.importorskip(keras.backend.backend(), reason="Keras needs its backend")

from sparkvod.estimators import Callback, KerasEstimator  # noqa: E402

X = np.random.default_rng(3).standard_normal((203, 3)).astype("float32")
Y = (X @ np.array([1, -2, 0.5]) + 0.3).astype("float32")


@pytest.fixture(autouse=True)
def elsewhere(leave_to_full: Callable[[str], None]) -> None:
    if keras.backend.backend() != "jax":
        leave_to_full("the contract, on Spark, shows it for this backend")


def fitted(folder: Path, backend: Any, *between: Any, **params: Any) -> Any:
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential([keras.Input((3,)), layers.Dense(8, activation="tanh"), *between, layers.Dense(1)])
    store = write(folder, x=X, y=Y) if not folder.exists() else str(folder)
    rate = keras.optimizers.schedules.ExponentialDecay(0.02, 10, 0.5, staircase=True)
    defaults = {"feature_cols": ["x"], "label_cols": ["y"], "metrics": ["mae"], "epochs": 3, "random_seed": 4}
    return KerasEstimator(
        **{"model": model, "optimizer": keras.optimizers.Adam(rate), "loss": "mse", **defaults},
        **{"store": store, "backend": backend, "run_id": "run", "verbose": 0, **params},
    ).fit_on_parquet()


def weights(model: Any) -> np.ndarray:
    return np.concatenate([weight.ravel() for weight in model.getModel().get_weights()])


@pytest.mark.timeout(120)
def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    one = fitted(tmp_path / "one", Here(), batch_size=40)
    two = fitted(tmp_path / "two", LocalLauncher(2, verbose=0), batch_size=20)
    np.testing.assert_allclose(weights(two), weights(one), rtol=0, atol=1e-5)
    assert two.getHistory()[-1]["train"] == pytest.approx(one.getHistory()[-1]["train"], rel=1e-4)


@pytest.mark.timeout(150)
def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """Of a model whose ranks have statistics of their own within an epoch, which they may when callbacks run."""
    ranks = LocalLauncher(2, verbose=0)
    options = {"batch_size": 20, "checkpoint_every": 2}

    def between() -> list[Any]:
        return [keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dropout(0.3)]

    whole = fitted(tmp_path / "whole", ranks, *between(), **options)
    interrupt = Interrupt(tmp_path / "interrupted", epoch=1, step=4)
    with pytest.raises(WorkerError, match="interrupted by the test"):
        fitted(tmp_path / "broken", ranks, *between(), callbacks=[interrupt], **options)
    resumed = fitted(tmp_path / "broken", ranks, *between(), callbacks=[Callback()], **options)
    assert weights(resumed).tobytes() == weights(whole).tobytes()
    assert [record["train"] for record in resumed.getHistory()] == [r["train"] for r in whole.getHistory()]
