"""Keras inside Spark's Python workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparkvod import config
from sparkvod.estimators.predictor import Predict, Predictor


@dataclass(frozen=True)
class KerasPredictor(Predictor):
    """A Keras model as it travels.

    Attributes:
        backend: the backend of Keras that it runs on.
        labels: names of the labels, which tell the order of the outputs.
    """

    backend: str
    labels: tuple[str, ...]

    def load(self, content: bytes) -> Predict:
        """Returns the function; the model predicts in inference, on one core."""
        config.set_environment({"KERAS_BACKEND": self.backend})  # Keras reads it when it is imported first
        from sparkvod.estimators.keras import inference

        predict = inference.prediction(content, self.inputs, self.labels, self.backend)

        def from_columns(columns: Mapping[str, np.ndarray], rows: int) -> Sequence[np.ndarray]:
            return predict([item.array(columns, rows) for item in self.inputs])

        return from_columns
