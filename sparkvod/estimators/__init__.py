"""Spark ML estimators: ``fit`` trains on a DataFrame with several ranks, the model's ``transform`` predicts.

Everything here is imported when it is first used, so that no framework is needed for another one's estimator.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sparkvod.errors import require

if TYPE_CHECKING:
    from sparkvod.estimators.callbacks import Callback
    from sparkvod.estimators.keras import KerasEstimator, KerasModel
    from sparkvod.estimators.torch import TorchEstimator, TorchModel
    from sparkvod.launch.spark import SparkLauncher as SparkBackend

_PLACES = {
    "Callback": ("sparkvod.estimators.callbacks", "Callback"),
    "KerasEstimator": ("sparkvod.estimators.keras", "KerasEstimator"),
    "KerasModel": ("sparkvod.estimators.keras", "KerasModel"),
    "SparkBackend": ("sparkvod.launch.spark", "SparkLauncher"),
    "TorchEstimator": ("sparkvod.estimators.torch", "TorchEstimator"),
    "TorchModel": ("sparkvod.estimators.torch", "TorchModel"),
}

__all__ = ["Callback", "KerasEstimator", "KerasModel", "SparkBackend", "TorchEstimator", "TorchModel"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    module, attribute = _PLACES[name]
    framework = module.removeprefix("sparkvod.estimators.")
    if framework in ("keras", "torch"):
        require("spark", f"sparkvod.estimators.{name}", "pyspark", "numpy", "pyarrow", "fsspec")
        require(framework, f"sparkvod.estimators.{name}", framework)
    return getattr(importlib.import_module(module), attribute)
