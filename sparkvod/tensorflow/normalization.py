"""``SyncBatchNormalization``: batch normalization by the statistics of all ranks' batches together.

A module of its own because it needs Keras, which ``sparkvod.tensorflow`` otherwise does not import.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from sparkvod.core import basics
from sparkvod.core.ops import Sum
from sparkvod.tensorflow import naming, ops

# Keras 3's and, under old TensorFlows, Keras 2's: both have what is used here.
_BatchNormalization: Any = tf.keras.layers.BatchNormalization
_register: Any = getattr(tf.keras, "saving", tf.keras.utils).register_keras_serializable


@_register(package="sparkvod")
class SyncBatchNormalization(_BatchNormalization):
    """As ``keras.layers.BatchNormalization``, with the statistics of the ranks' batches joined while it trains.

    The outputs, the gradients and the moving averages are those of one process with all ranks' rows, however many
    each rank has, none included. All ranks must call the layer as often as the others while they train.

    Args:
        fused: for compatibility; only False (or None) is possible.
        **kwargs: those of ``keras.layers.BatchNormalization``: ``axis`` (one), ``momentum``, ``epsilon``, ...

    Raises:
        ValueError: ``fused``, ``renorm``, ``virtual_batch_size``, ``synchronized`` or several axes were asked for, or
            Keras does not run on TensorFlow.
    """

    #: Whether this rank has no rows in the step: what the layer is called with is then normalized but not counted.
    stands_in = False

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if (backend := tf.keras.backend.backend()) != "tensorflow":
            raise ValueError(
                f"SyncBatchNormalization needs Keras's TensorFlow backend, but Keras runs on {backend}: set "
                "KERAS_BACKEND=tensorflow, or use BatchNormalization"
            )
        for name, value in (("fused", fused), *((k, kwargs.get(k)) for k in ("renorm", "virtual_batch_size"))):
            if value:
                raise ValueError(f"{name}={value!r} was found, False was expected of SyncBatchNormalization")
        if kwargs.pop("synchronized", False):
            raise ValueError(
                "synchronized=True was found, which is tf.distribute's way; False was expected: this layer "
                "synchronizes sparkvod's ranks by itself"
            )
        axis = kwargs.get("axis", -1)
        if isinstance(axis, (list, tuple)):
            if len(axis) != 1:
                raise ValueError(f"axis={axis!r} was found, one axis was expected of SyncBatchNormalization")
            kwargs["axis"] = axis[0]
        super().__init__(**kwargs)
        # Keras then compiles no model by XLA that has this layer: XLA cannot hold the collective.
        self.supports_jit = False

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """Returns the normalized inputs, of their shape and dtype.

        Args:
            inputs: a tensor; every dimension but ``axis`` is averaged over.
            training: whether by the batches' statistics, which then move the averages; else by the averages.
            mask: booleans, with one dimension less than the inputs: what counts in the statistics.

        Raises:
            HorovodInternalError: an eager reduction failed.
        """
        values = tf.cast(inputs, tf.float64 if inputs.dtype == tf.float64 else tf.float32)
        if (training or self.stands_in) and self.trainable:
            mean, variance = self._joined(values, mask)
            self._move(self.moving_mean, mean)
            self._move(self.moving_variance, variance)
        else:
            mean, variance = (tf.cast(average, values.dtype) for average in (self.moving_mean, self.moving_variance))
        shape = self._broadcastable(values)
        factor = tf.math.rsqrt(variance + self.epsilon)
        if self.scale:
            factor *= tf.cast(self.gamma, values.dtype)
        result = (values - tf.reshape(mean, shape)) * tf.reshape(factor, shape)
        if self.center:
            result += tf.reshape(tf.cast(self.beta, values.dtype), shape)
        return tf.cast(result, getattr(self, "compute_dtype", None) or inputs.dtype)

    def _joined(self, values: Any, mask: Any) -> tuple[Any, Any]:
        # Mean and biased variance, each [channels], over all ranks. Every rank puts its count, mean and sum of squared
        # deviations into a row of its own of what is summed: they join without the cancellation that a mean of squares
        # has, by one collective, whose gradient is the sum that it should be. (Chan, Golub, LeVeque 1979)
        channel = self._channel(values)
        axes = [k for k in range(values.shape.rank) if k != channel]
        rows = tf.ones_like(tf.gather(values, [0], axis=channel), tf.bool)
        counted = rows if mask is None else rows & tf.expand_dims(tf.cast(mask, tf.bool), channel)
        if self.stands_in:
            counted = tf.zeros_like(counted)
        count = tf.reduce_sum(tf.cast(counted, values.dtype))
        mean = tf.math.divide_no_nan(tf.reduce_sum(tf.where(counted, values, 0), axes), count)
        deviations = tf.where(counted, values - tf.reshape(mean, self._broadcastable(values)), 0)
        squares = tf.reduce_sum(tf.square(deviations), axes)
        mine = tf.concat([tf.reshape(count, [1]), mean, squares], 0)
        row = tf.one_hot(ops.rank_op(), basics.size(), dtype=values.dtype)
        # After the layer, not after tensors, which may be others in the step of a rank without rows.
        kind = "sync_batch_normalization"
        name = None if tf.executing_eagerly() else naming.in_graph(kind, self.name)
        by_rank = ops.allreduce(row[:, tf.newaxis] * mine, op=Sum, name=name)
        counts, (means, squares) = by_rank[:, :1], tf.split(by_rank[:, 1:], 2, axis=1)
        total = tf.reduce_sum(counts)
        mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), total)
        squares = tf.reduce_sum(squares + counts * tf.square(means - mean), 0)
        return mean, tf.math.divide_no_nan(squares, total)

    def _channel(self, values: Any) -> int:
        axis = self.axis[0] if isinstance(self.axis, (list, tuple)) else self.axis
        return int(axis) % values.shape.rank

    def _broadcastable(self, values: Any) -> list[int]:
        shape = [1] * values.shape.rank
        shape[self._channel(values)] = -1
        return shape

    def _move(self, average: Any, value: Any) -> None:
        kept = tf.convert_to_tensor(average)
        average.assign(kept * self.momentum + tf.cast(value, kept.dtype) * (1.0 - self.momentum))


@contextmanager
def without_rows(model: Any) -> Iterator[None]:
    """Let the ``SyncBatchNormalization`` layers of a model take part in a training step without counting its rows.

    They do so also where the model is called for inference, so that nothing else of it changes by rows that only stand
    in for none.

    Args:
        model: a Keras model.
    """
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, SyncBatchNormalization)]
    for layer in layers:
        layer.stands_in = True
    try:
        yield
    finally:
        for layer in layers:
            layer.stands_in = False
