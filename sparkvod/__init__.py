"""Distributed deep learning as a Spark ML estimator.

``sparkvod.run`` starts a function on Spark, ``sparkvod.run_local`` in local processes; ``sparkvod.torch`` is the
front end that a training script imports; ``sparkvod.estimators`` holds the Spark ML estimators. Everything is
imported on first use, so that ``import sparkvod`` needs neither Spark nor a framework nor the built engine.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {"run": "sparkvod.launch.spark", "run_local": "sparkvod.launch.local", "stats": "sparkvod.core.basics"}

__all__ = ["__version__", "run", "run_local", "stats"]  # noqa: F822


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'sparkvod' has no attribute {name!r}")
