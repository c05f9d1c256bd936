"""``KerasModel``: what ``KerasEstimator.fit`` returns."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparkvod.estimators import table
from sparkvod.estimators.columns import ColumnLike, Input, OutputSpec
from sparkvod.estimators.keras.predictor import KerasPredictor
from sparkvod.estimators.model import ModelBase
from sparkvod.estimators.predictor import Output, Predictor


class KerasModel(ModelBase, table=table.of(table.MODEL, "keras")):
    """A trained Keras model as a Spark ML model.

    ``transform`` adds a column per output, ``<label>__output`` by default: a float or double, as the output is, for one
    number per row, an ML vector for several. A model that was trained elsewhere needs ``model``, ``feature_columns``
    and ``label_columns``. All keyword arguments are Params; see ``explainParams()``.
    """

    def getModel(self) -> Any:  # noqa: N802, the names are Spark's
        """Returns the trained ``keras.Model``, compiled; changes to it are what ``transform`` predicts by."""
        return self.value("model")

    def _plan_inputs(self, features: Sequence[ColumnLike]) -> tuple[Input, ...]:
        from sparkvod.estimators.keras import model_io

        shapes, dtypes = self.value("input_shapes"), self.value("input_dtypes")
        return model_io.plan_inputs(self.getModel(), features, shapes, dtypes)

    def _try_outputs(self, inputs: tuple[Input, ...], arrays: Sequence[np.ndarray]) -> list[OutputSpec]:
        from sparkvod.estimators.keras import model_io

        feed = model_io.Feed(self.getModel(), inputs, self.value("label_columns") or self.output_columns)
        return [model_io.spec(output) for output in feed.call_arrays(arrays)]

    def _takes_text(self) -> bool:
        from sparkvod.estimators.keras import model_io

        return "string" in [*(self.value("input_dtypes") or []), *model_io.input_dtypes(self.getModel())]

    def _predictor(self, inputs: tuple[Input, ...], outputs: tuple[Output, ...], widths: dict[str, int]) -> Predictor:
        import keras

        from sparkvod.estimators.keras import packing

        content = packing.dump_model(self.getModel(), self.value("custom_objects"))
        backend, labels = keras.backend.backend(), tuple(self.value("label_columns") or self.output_columns)
        # A .keras file has its date in it, so the weights and the configuration are what is hashed.
        key = hashlib.sha256(packing.digest(content) + repr((inputs, labels, backend)).encode()).hexdigest()
        return KerasPredictor(key, content, inputs, outputs, widths, backend, labels)

    def _dump(self, name: str, value: Any) -> bytes:
        from sparkvod.estimators.keras import packing

        if name == "model":
            return packing.dump_model(value, self.value("custom_objects"), bare=False)
        return super()._dump(name, value)

    def _load(self, name: str, content: bytes) -> Any:
        from sparkvod.estimators.keras import packing

        return packing.load_model(content, compiled=True) if name == "model" else super()._load(name, content)
