"""What differs between Keras's backends: one module each, with the same functions."""

from __future__ import annotations

import importlib
from typing import Any

import keras

_MODULES = {name: f"sparkvod.keras.backends.with_{name}" for name in ("tensorflow", "torch", "jax")}


def current() -> Any:
    """Returns the module of the backend that Keras runs on.

    Raises:
        ImportError: Keras is older than 3, or its backend is not supported.
    """
    if int(keras.__version__.split(".")[0]) < 3:
        raise ImportError(f"Keras {keras.__version__} was found, 3.0 or newer was expected; install keras>=3")
    name = keras.backend.backend()
    if name not in _MODULES:
        raise ImportError(
            f"Keras's backend {name!r} was found, one of {', '.join(_MODULES)} was expected; set KERAS_BACKEND before "
            "keras is imported"
        )
    return importlib.import_module(_MODULES[name])
