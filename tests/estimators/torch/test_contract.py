"""The contract of all estimators, for PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.contracts.estimator import FEATURES, EstimatorContract

torch = pytest.importorskip("torch", reason="the PyTorch estimator needs torch")


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


class TestTorchEstimator(EstimatorContract):
    def estimator(self, optimizer: str = "sgd", random_layer: bool = False, **params: Any) -> Any:
        from sparkvod.estimators import TorchEstimator

        torch.manual_seed(7)
        layers = [torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]
        if random_layer:
            layers.insert(2, torch.nn.Dropout(0.2))
        model = torch.nn.Sequential(*layers)
        if optimizer == "adam":
            params = {"optimizer": torch.optim.Adam(model.parameters(), lr=0.01), "lr_scheduler": halving, **params}
        else:
            params = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), **params}
        return TorchEstimator(
            **{"model": model, "loss": torch.nn.MSELoss(), "feature_cols": FEATURES, "label_cols": ["y"], **params}
        )

    def weights(self, fitted: Any) -> np.ndarray:
        return np.concatenate([p.detach().numpy().ravel() for p in fitted.getModel().parameters()])

    def predict(self, fitted: Any, x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return fitted.getModel()(torch.from_numpy(x)).numpy()[:, 0]
