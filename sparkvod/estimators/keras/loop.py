"""Losses, sums and metrics of a batch: what is the same on all of Keras's backends, eager or while it is traced."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from sparkvod.estimators.keras.losses import LossTerm
from sparkvod.estimators.keras.model_io import Feed

#: What a batch's sums leave the backend in (batches are added up in float64): JAX has only this, unless it is told to.
_SUMS = "float32" if keras.backend.backend() == "jax" else "float64"


class Loop:
    """A model with its losses and metrics.

    Sums are float64 vectors: the terms' sums, their normalisers, the penalties times rows, the metrics' states, rows.
    Metrics count what they see in variables that add up, over batches and over ranks; so their results over all ranks
    are those of one process, for any metric of Keras's.

    Args:
        feed: how the model is called.
        terms: the losses, one per label.
        weights: the losses' factors.
        own_loss: whether the model's class has a ``compute_loss`` of its own, which then is the loss.
    """

    def __init__(self, feed: Feed, terms: Sequence[LossTerm], weights: Sequence[float], own_loss: bool) -> None:
        self.feed, self.model = feed, feed.model
        self.terms, self.weights, self.own_loss = list(terms), list(weights), own_loss
        self.metric_variables: list[Any] = []
        self._is_told = own_loss and "training" in inspect.signature(self.model.compute_loss).parameters

    def build(self, inputs: Sequence[Any], labels: Sequence[Any], weights: Any) -> list[Any]:
        """Makes all variables, by a batch that counts for nothing; returns the outputs."""
        outputs = self.feed.call(inputs, training=False)
        self.update_metrics(inputs, labels, outputs, weights)
        self.metric_variables = [variable for metric in self.metrics() for variable in metric.variables]
        self.reset_metrics()
        return outputs

    def metrics(self) -> list[Any]:
        """Returns the model's metrics, those of ``compile`` as one, without that of the loss."""
        loss = getattr(self.model, "_loss_tracker", None)
        return [metric for metric in self.model.metrics if metric is not loss]

    def update_metrics(
        self, inputs: Sequence[Any], labels: Sequence[Any], outputs: Sequence[Any], weights: Any
    ) -> None:
        """Counts a batch in."""
        say = self.feed.as_model_says
        packed = inputs[0] if len(inputs) == 1 else list(inputs)
        self.model.compute_metrics(packed, say(labels), say(outputs), weights)

    def reset_metrics(self) -> None:
        """Sets the metrics' variables to 0."""
        for metric in self.metrics():
            metric.reset_state()

    def losses(
        self, inputs: Sequence[Any], labels: Sequence[Any], outputs: Sequence[Any], weights: Any, training: bool
    ) -> tuple[list[Any], Any]:
        """Returns the terms' sums over this rank's rows, and the model's penalties, a mean over rows."""
        if self.own_loss:
            say = self.feed.as_model_says
            packed = inputs[0] if len(inputs) == 1 else list(inputs)
            told = {"training": training} if self._is_told else {}  # as Keras does
            mean = self.model.compute_loss(packed, say(labels), say(outputs), weights, **told)
            rows = ops.cast(ops.shape(outputs[0])[0], mean.dtype) if weights is None else ops.sum(weights)
            zero = ops.zeros((), mean.dtype)
            return [mean * ops.cast(rows, mean.dtype)] + [zero] * (len(self.terms) - 1), zero
        totals = [
            term.total(label, output, weights) for term, label, output in zip(self.terms, labels, outputs, strict=True)
        ]
        penalty = ops.zeros((), totals[0].dtype)
        for value in self.model.losses:
            penalty = penalty + ops.cast(ops.sum(value), penalty.dtype)
        return totals, penalty

    def factors(self, normalisers: np.ndarray) -> np.ndarray:
        """Returns what the terms' sums are multiplied by, float32, given the normalisers of all ranks."""
        if self.own_loss:
            normalisers = np.array([normalisers[0], *[0.0] * (len(self.terms) - 1)])
        divided = np.divide(1.0, normalisers, out=np.zeros(len(normalisers)), where=normalisers > 0)
        factors = [
            (1.0 if self.own_loss else weight) * (by if term.divides or self.own_loss else 1.0)
            for term, weight, by in zip(self.terms, self.weights, divided, strict=True)
        ]
        return np.array(factors, np.float32)

    def sums(self, totals: Sequence[Any], penalty: Any, rows: Any) -> Any:
        """Returns a batch's sums without the normalisers, as a tensor, and sets the metrics to 0."""
        rows = ops.cast(rows, _SUMS)
        parts = [ops.reshape(ops.cast(total, _SUMS), (1,)) for total in totals]
        parts.append(ops.reshape(ops.cast(penalty, _SUMS) * rows, (1,)))
        parts += [ops.reshape(ops.cast(variable, _SUMS), (-1,)) for variable in self.metric_variables]
        vector = ops.concatenate(parts)
        self.reset_metrics()
        return vector

    # ---- figures ----------------------------------------------------------------------------------------------------

    @property
    def sums_size(self) -> int:
        """Length of the vectors of sums."""
        states = sum(int(np.prod(variable.shape)) for variable in self.metric_variables)
        return 2 * len(self.terms) + 1 + states + 1

    def vector(self, found: np.ndarray, normalisers: np.ndarray, rows: int) -> np.ndarray:
        """Returns sums with the normalisers and the rows in them."""
        labels = len(self.terms)
        return np.concatenate([found[:labels], normalisers, found[labels:], [rows]])

    def record(self, sums: np.ndarray) -> dict[str, float]:
        """Returns losses and metrics by Keras's names for them, from the sums of all ranks and steps."""
        labels = len(self.terms)
        totals, normalisers, rows = sums[:labels], sums[labels : 2 * labels], max(float(sums[-1]), 1.0)
        means = [
            total / normaliser if normaliser > 0 and (term.divides or self.own_loss) else total
            for term, total, normaliser in zip(self.terms, totals, normalisers, strict=True)
        ]
        weights = [1.0, *[0.0] * (labels - 1)] if self.own_loss else self.weights
        loss = sum(weight * mean for weight, mean in zip(weights, means, strict=True)) + sums[2 * labels] / rows
        found = {"loss": float(loss)}
        if labels > 1 and not self.own_loss:
            found |= {f"{name}_loss": float(mean) for name, mean in zip(self.feed.output_names, means, strict=True)}
        return found | self._metric_results(sums[2 * labels + 1 : -1])

    def _metric_results(self, states: np.ndarray) -> dict[str, float]:
        if not self.metric_variables:
            return {}
        at, kept = 0, [np.array(ops.convert_to_numpy(variable)) for variable in self.metric_variables]
        for variable in self.metric_variables:
            size = int(np.prod(variable.shape))
            value = states[at : at + size].reshape(tuple(variable.shape))
            variable.assign(value.astype(keras.backend.standardize_dtype(variable.dtype)))
            at += size
        results = self.model.get_metrics_result()
        found = {name: _plain(value) for name, value in results.items() if name != "loss"}
        for variable, value in zip(self.metric_variables, kept, strict=True):
            variable.assign(value)
        return found


def _plain(value: Any) -> Any:
    array = np.asarray(ops.convert_to_numpy(value))
    return float(array) if array.ndim == 0 else array.tolist()
