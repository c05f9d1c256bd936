"""The estimator for PyTorch. What workers import from here needs no Spark, so names are imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkvod.estimators.torch.estimator import TorchEstimator
    from sparkvod.estimators.torch.model import TorchModel

_PLACES = {"TorchEstimator": "estimator", "TorchModel": "model"}

__all__ = ["TorchEstimator", "TorchModel"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
