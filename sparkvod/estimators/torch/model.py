"""``TorchModel``: what ``TorchEstimator.fit`` returns."""

from __future__ import annotations

import hashlib
from typing import Any

from sparkvod.estimators import table
from sparkvod.estimators.columns import Input
from sparkvod.estimators.model import ModelBase
from sparkvod.estimators.predictor import Output, Predictor
from sparkvod.estimators.torch.predictor import TorchPredictor


class TorchModel(ModelBase, table=table.of(table.MODEL, "torch")):
    """A trained PyTorch module as a Spark ML model.

    ``transform`` adds a column per label, ``<label>__output`` by default: the label's own type for one number per row,
    an ML vector or an array for several. All keyword arguments are Params; see ``explainParams()``.
    """

    def getModel(self) -> Any:  # noqa: N802, the names are Spark's
        """Returns the trained module; changes to it are what ``transform`` predicts by."""
        return self.value("model")

    def getOptimizer(self) -> Any:  # noqa: N802
        """Returns the optimizer over :meth:`getModel`'s parameters, with its state after the last step, or None."""
        detached = self.value("optimizer")
        return detached.attach(self.getModel()) if hasattr(detached, "attach") else detached

    def _predictor(self, inputs: tuple[Input, ...], outputs: tuple[Output, ...], widths: dict[str, int]) -> Predictor:
        from sparkvod.estimators.torch import packing

        content = packing.dump_model(self.getModel())
        key = hashlib.sha256(content + repr(inputs).encode()).hexdigest()
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
