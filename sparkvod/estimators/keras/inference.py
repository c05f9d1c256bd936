"""A model as a function from arrays to arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from sparkvod.errors import SparkvodError
from sparkvod.estimators.columns import Input
from sparkvod.estimators.keras import packing, steps
from sparkvod.estimators.keras.model_io import Feed


def prediction(
    content: bytes, inputs: Sequence[Input], labels: Sequence[str], backend: str
) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]]:
    """Returns the function of a model's inputs that returns its outputs in the labels' order.

    Args:
        content: the model as a ``.keras`` file.
        inputs: how columns make its inputs.
        labels: names of the labels.
        backend: the backend that it is to run on.

    Raises:
        SparkvodError: this process has another backend.
    """
    if keras.backend.backend() != backend:
        raise SparkvodError(
            f"the model is of Keras's backend {backend!r}, and this Python worker has {keras.backend.backend()!r}, "
            "which was loaded before: one backend was expected; start a new Spark session to change it"
        )
    steps.use_threads(1)  # Spark runs as many workers as there are cores for tasks
    feed = Feed(packing.load_model(content), inputs, labels)
    called = steps.compiled(feed)

    def predict(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        starts = range(0, len(arrays[0]), steps.ROWS)
        parts = [_arrays(called([array[at : at + steps.ROWS] for array in arrays])) for at in starts]
        return parts[0] if len(parts) == 1 else [np.concatenate(outputs) for outputs in zip(*parts, strict=True)]

    return predict


def _arrays(outputs: Sequence[Any]) -> list[np.ndarray]:
    return [np.asarray(keras.ops.convert_to_numpy(output)) for output in outputs]
