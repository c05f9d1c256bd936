"""``TorchModel``: what ``TorchEstimator.fit`` returns."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparkvod.estimators import columns, table
from sparkvod.estimators.columns import ColumnLike, Input, OutputSpec
from sparkvod.estimators.model import ModelBase
from sparkvod.estimators.predictor import Output, Predictor
from sparkvod.estimators.torch.predictor import TorchPredictor


class TorchModel(ModelBase, table=table.of(table.MODEL, "torch")):
    """A trained PyTorch module as a Spark ML model.

    ``transform`` adds a column per output, ``<label>__output`` by default: a float or double, as the output is, for one
    number per row, an ML vector for several. A module that was trained elsewhere needs ``model``, ``feature_columns``
    and ``label_columns``. All keyword arguments are Params; see ``explainParams()``.
    """

    def getModel(self) -> Any:  # noqa: N802, the names are Spark's
        """Returns the trained module; changes to it are what ``transform`` predicts by."""
        return self.value("model")

    def getOptimizer(self) -> Any:  # noqa: N802
        """Returns the optimizer over :meth:`getModel`'s parameters, with its state after the last step, or None."""
        detached = self.value("optimizer")
        return detached.attach(self.getModel()) if hasattr(detached, "attach") else detached

    def _plan_inputs(self, features: Sequence[ColumnLike]) -> tuple[Input, ...]:
        from sparkvod.estimators.torch import checking

        default = checking.default_dtype(self.getModel())
        return columns.plan_inputs(features, self.value("input_shapes"), self.value("input_dtypes"), default)

    def _try_outputs(self, inputs: tuple[Input, ...], arrays: Sequence[np.ndarray]) -> list[OutputSpec]:
        from sparkvod.estimators.torch import checking, model_io

        found = model_io.outputs(checking.forward(self.getModel(), inputs, arrays))
        return [model_io.spec(output) for output in found]

    def _predictor(self, inputs: tuple[Input, ...], outputs: tuple[Output, ...], widths: dict[str, int]) -> Predictor:
        from sparkvod.estimators.torch import packing

        content = packing.dump_model(self.getModel())
        hashed = hashlib.sha256(content)
        hashed.update(repr(inputs).encode())
        key = hashed.hexdigest()
        return TorchPredictor(key, content, inputs, outputs, widths)

    def _dump(self, name: str, value: Any) -> bytes:
        from sparkvod.estimators.torch import packing

        if name == "model":
            return packing.dump_model(value)
        if name == "optimizer" and not isinstance(value, packing.DetachedOptimizer):
            value = packing.detach(value, self.getModel())
        return super()._dump(name, value)

    def _load(self, name: str, content: bytes) -> Any:
        from sparkvod.estimators.torch import packing

        return packing.load_model(content) if name == "model" else super()._load(name, content)
