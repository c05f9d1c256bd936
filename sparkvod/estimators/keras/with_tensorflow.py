"""Steps on TensorFlow, each a graph that is traced once for batches of any number of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

from sparkvod import log
from sparkvod.estimators.columns import numpy_dtype
from sparkvod.estimators.keras import steps
from sparkvod.estimators.keras.loop import Loop
from sparkvod.estimators.keras.model_io import Feed
from sparkvod.estimators.keras.no_generator import random_state, set_random_state
from sparkvod.tensorflow.normalization import without_rows

__all__ = ["Steps", "compiled", "random_state", "set_random_state", "use_threads"]

_LOG = log.get("estimators")


def use_threads(number: int) -> None:
    """Sets the threads of an operation; TensorFlow takes this only before its first operation in a process."""
    if tf.config.threading.get_intra_op_parallelism_threads() == number:
        return
    try:
        tf.config.threading.set_intra_op_parallelism_threads(number)
    except RuntimeError as error:
        _LOG.debug("TensorFlow keeps its number of threads: %s", error)


class Steps(steps.Steps):
    """Runs steps as functions of TensorFlow."""

    def __init__(self, loop: Loop, optimizer: Any, passes: int) -> None:
        super().__init__(loop, optimizer, passes)
        self._summed: list[Any] | None = None
        self._functions: dict[Any, Callable[..., Any]] = {}

    def train(self, rows: steps.Rows, factors: np.ndarray, share: float, apply: bool) -> np.ndarray:
        """Goes forward and backward, and applies the gradients of all ranks."""
        kind = ("train", share > 0, apply)
        if kind not in self._functions:
            self._functions[kind] = self._traced(self._training(share > 0, apply), rows, True)
        step = self._functions[kind]
        found: np.ndarray = step(
            *map(_tensors, _lists(rows)), tf.constant(factors), tf.constant(share, tf.float32)
        ).numpy()
        return found

    def evaluate(self, rows: steps.Rows) -> np.ndarray:
        """Returns the batch's sums without training on it."""
        if "evaluate" not in self._functions:
            self._functions["evaluate"] = self._traced(self._evaluating, rows, False)
        found: np.ndarray = self._functions["evaluate"](*map(_tensors, _lists(rows))).numpy()
        return found

    def _traced(self, function: Callable[..., Any], rows: steps.Rows, trains: bool) -> Callable[..., Any]:
        signature: list[Any] = [[_any_rows(array) for array in arrays] for arrays in _lists(rows)]
        if trains:
            signature += [tf.TensorSpec([len(rows.labels)], tf.float32), tf.TensorSpec([], tf.float32)]
        made: Callable[..., Any] = tf.function(function, input_signature=signature, autograph=False)
        return made

    def _training(self, counts: bool, apply: bool) -> Callable[..., Any]:
        loop, optimizer = self.loop, self.optimizer

        # All of its kinds have one name, so that a rank without rows meets the others in the same collectives.
        def step(inputs: Any, labels: Any, given: list[Any], factors: Any, share: Any) -> Any:
            weights = given[0] if given else None
            with tf.GradientTape() as tape:
                with nullcontext() if counts else without_rows(loop.model):
                    outputs = loop.feed.call(inputs, training=counts)
                totals, penalty = loop.losses(inputs, labels, outputs, weights, counts)
                loss = tf.add_n([tf.cast(f, t.dtype) * t for f, t in zip(tf.unstack(factors), totals, strict=True)])
                loss = loss + penalty * tf.cast(share, penalty.dtype)
                loss = optimizer.scale_loss(loss)
            grads = tape.gradient(loss, [variable.value for variable in self.variables])
            self._apply(grads, apply)
            if counts:
                loop.update_metrics(inputs, labels, outputs, weights)
            return loop.sums(totals, penalty, tf.shape(outputs[0])[0])

        return step

    def _apply(self, grads: list[Any], apply: bool) -> None:
        # Dense, also on one rank: for slices of an embedding Keras's optimizers have rules of their own, by which the
        # weights would depend on how rows are shared among ranks.
        grads = [None if grad is None else tf.convert_to_tensor(grad) for grad in grads]
        if self.passes > 1:
            summed = self._accumulators()
            grads = [
                None if grad is None else total.assign_add(grad) for grad, total in zip(grads, summed, strict=True)
            ]
        if not apply:
            return
        self.optimizer.apply(grads, self.variables)
        if self.passes > 1:
            with tf.control_dependencies([grad for grad in grads if grad is not None]):
                for total in summed:
                    total.assign(tf.zeros_like(total))

    def _accumulators(self) -> list[Any]:
        if self._summed is None:
            with tf.init_scope():
                self._summed = [tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False) for v in self.variables]
        return self._summed

    def _evaluating(self, inputs: Any, labels: Any, given: list[Any]) -> Any:
        loop, weights = self.loop, given[0] if given else None
        outputs = loop.feed.call(inputs, training=False)
        totals, penalty = loop.losses(inputs, labels, outputs, weights, training=False)
        loop.update_metrics(inputs, labels, outputs, weights)
        return loop.sums(totals, penalty, tf.shape(outputs[0])[0])


def _any_rows(array: np.ndarray) -> Any:
    return tf.TensorSpec([None, *array.shape[1:]], tf.string if array.dtype.kind in "OU" else array.dtype)


def _lists(rows: steps.Rows) -> tuple[Sequence[np.ndarray], ...]:
    """Returns inputs, labels and weights, these as a list too, since a function's signature takes no None."""
    return rows.inputs, rows.labels, [] if rows.weights is None else [rows.weights]


def _tensors(arrays: Sequence[np.ndarray]) -> list[Any]:
    return [tf.convert_to_tensor(array) for array in arrays]


def compiled(feed: Feed) -> Callable[[Sequence[np.ndarray]], list[Any]]:
    """Returns the model as a function of arrays: traced once, for any number of rows."""
    signature = [[_any_rows(np.empty((0, *item.tail), numpy_dtype(item.dtype))) for item in feed.inputs]]
    traced = tf.function(lambda tensors: feed.call(tensors, training=False), input_signature=signature, autograph=False)
    return lambda arrays: traced(_tensors(arrays))
