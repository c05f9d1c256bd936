"""The contract of all estimators, for Keras on the backend of this process: TensorFlow, or what KERAS_BACKEND says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.contracts.estimator import FEATURES, EstimatorContract

keras = pytest.importorskip("keras", reason="the Keras estimator needs keras")
pytest.importorskip(keras.backend.backend(), reason="Keras needs its backend")


#: What is the core's and TorchEstimator's run shows as well, or another choice of the same.
WITH_FULL = ("ranks_trains_to_the_same_weights[sgd]", "same_bits[None]", "not_go_on", "takes_params_and_lists")


class TestKerasEstimator(EstimatorContract):
    @pytest.fixture(autouse=True)
    def choice(self, request: pytest.FixtureRequest, leave_to_full: Callable[[str], None]) -> None:
        if any(part in request.node.name for part in WITH_FULL):
            leave_to_full("TorchEstimator's run, or another choice of the same, shows it")

    def estimator(self, optimizer: str = "sgd", random_layer: bool = False, **params: Any) -> Any:
        from sparkvod.estimators import KerasEstimator

        keras.utils.set_random_seed(7)
        layers = [keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
        if random_layer:
            layers.insert(2, keras.layers.Dropout(0.2))
        if optimizer == "adam":
            rate = keras.optimizers.schedules.ExponentialDecay(0.01, 16, 0.5, staircase=True)
            params = {"optimizer": keras.optimizers.Adam(rate), **params}
        else:
            params = {"optimizer": keras.optimizers.SGD(0.05, momentum=0.9), **params}
        model = keras.Sequential(layers)
        return KerasEstimator(
            **{"model": model, "loss": "mse", "feature_cols": FEATURES, "label_cols": ["y"], **params}
        )

    def weights(self, fitted: Any) -> np.ndarray:
        return np.concatenate([weight.ravel() for weight in fitted.getModel().get_weights()])

    def predict(self, fitted: Any, x: np.ndarray) -> np.ndarray:
        return np.asarray(keras.ops.convert_to_numpy(fitted.getModel()(x)))[:, 0]
