"""The estimator for Keras 3. What workers import from here needs no Spark, so names are imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkvod.estimators.keras.estimator import KerasEstimator
    from sparkvod.estimators.keras.model import KerasModel

_PLACES = {"KerasEstimator": "estimator", "KerasModel": "model"}

__all__ = ["KerasEstimator", "KerasModel"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
