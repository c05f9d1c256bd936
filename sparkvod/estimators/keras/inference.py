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
    called: Callable[..., Any] = steps.compiled(lambda tensors: feed.call(tensors, training=False), inputs)

    def predict(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.asarray(keras.ops.convert_to_numpy(output)) for output in called(arrays)]

    return predict
