"""PyTorch inside Spark's Python workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from sparkvod.estimators.predictor import Predict, Predictor
from sparkvod.estimators.torch import model_io, packing


class TorchPredictor(Predictor):
    """A PyTorch module as it travels."""

    def load(self, content: bytes) -> Predict:
        """Returns the function; the module predicts in evaluation mode, without gradients, on one core."""
        torch.set_num_threads(1)  # Spark runs as many workers as there are cores for tasks
        model = packing.load_model(content).eval()

        def predict(columns: Mapping[str, np.ndarray], rows: int) -> Sequence[np.ndarray]:
            with torch.no_grad():
                found = model_io.outputs(model(*model_io.inputs(self.inputs, columns, rows)))
            return [model_io.array(output) for output in found]

        return predict
