"""Keras on TensorFlow, by the peer's name: ``import sparkvod.tensorflow.keras as hvd`` is ``sparkvod.keras``.

The one place of this room that knows the room above it, which knows TensorFlow.
"""

from __future__ import annotations

import keras

# Before the rest, which it would have chosen for another backend.
if (_backend := keras.config.backend() if hasattr(keras, "config") else "tensorflow") != "tensorflow":
    raise ImportError(
        f"Keras's backend {_backend!r} was found, 'tensorflow' was expected of sparkvod.tensorflow.keras; import "
        "sparkvod.keras, or set KERAS_BACKEND=tensorflow before keras is imported"
    )

from sparkvod.keras import *  # noqa: E402, F403
from sparkvod.keras import __all__ as __all__  # noqa: E402
