"""Functions and models with collectives can be saved by one rank and loaded by all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contracts.worlds import Suite
from tests.tensorflow.test_contract import QUIET
from tests.tensorflow.test_training import join

pytest.importorskip("tensorflow", reason="the TensorFlow front end needs tensorflow")


@contextmanager
def _folder() -> Iterator[Path]:
    import sparkvod.tensorflow as hvd

    folder = Path(hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None))
    try:
        yield folder
    finally:
        hvd.barrier()
        shutil.rmtree(folder, ignore_errors=True)


def _module(members: Any) -> Any:
    import tensorflow as tf

    import sparkvod.tensorflow as hvd

    function = tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32)])

    class Module(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = tf.Variable(2.0)

        @function
        def total(self, x: Any) -> Any:
            return hvd.allreduce(self.weight * x, op=hvd.Sum)

        @function
        def calls(self, x: Any) -> Any:
            return self.total(x), self.total(3.0 * x)

        @function
        def gradient(self, x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                square = self.total(x) ** 2
            return tape.gradient(square, x)

        @function
        def branch(self, x: Any) -> Any:
            return tf.cond(tf.reduce_sum(x) > 0, lambda: self.total(x), lambda: x)

        @function
        def loop(self, x: Any) -> Any:
            return tf.map_fn(lambda row: hvd.allreduce(row, op=hvd.Sum), x, parallel_iterations=4)

        @function
        def scattered(self, x: Any) -> Any:
            return hvd.reducescatter(x, op=hvd.Sum)

        @function
        def scattered_among(self, x: Any) -> Any:
            return hvd.reducescatter(x, op=hvd.Sum, process_set=members)

        @function
        def gathered(self, x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                rows = hvd.allgather(x)
                loss = tf.reduce_sum(rows * tf.range(tf.cast(tf.shape(rows)[0], tf.float32))[:, tf.newaxis])
            return rows, tape.gradient(loss, x)

    return Module()


def check_saved_functions() -> None:
    import tensorflow as tf

    import sparkvod.tensorflow as hvd

    rank, n = hvd.rank(), hvd.size()
    with _folder() as folder:
        members = hvd.add_process_set(range(1, n))  # without the one that saves
        module = _module(members)
        if rank == 0:  # the others load what they have never traced
            tf.saved_model.save(module, str(folder))
        hvd.barrier()
        loaded = tf.saved_model.load(str(folder))
    x = tf.ones([2 + rank, 4])
    even = tf.ones([5, 4])
    for _ in range(3):
        np.testing.assert_allclose(loaded.total(even), 2.0 * n * even)
        for found, factor in zip(loaded.calls(even), (2.0, 6.0), strict=True):
            np.testing.assert_allclose(found, factor * n * even)
        np.testing.assert_allclose(loaded.gradient(even), 8.0 * n * n * even)
        np.testing.assert_allclose(loaded.branch(even), 2.0 * n * even)
        np.testing.assert_allclose(loaded.loop(even), n * even)
        np.testing.assert_allclose(loaded.scattered(even), np.full((5 // n + (rank < 5 % n), 4), n))
        if rank:
            share = 5 // (n - 1) + (rank - 1 < 5 % (n - 1))
            np.testing.assert_allclose(loaded.scattered_among(even), np.full((share, 4), n - 1))
        rows, grad = loaded.gathered(x)
        first = sum(2 + other for other in range(rank))
        assert rows.shape[0] == sum(2 + other for other in range(n))
        np.testing.assert_allclose(grad, tf.range(first, first + 2.0 + rank)[:, tf.newaxis] * x)

    hvd.remove_process_set(members)

    # A function of this process and the loaded one, whose names are the same, follow each other.
    @tf.function
    def mixed(x: Any) -> Any:
        return module.total(x), loaded.total(2.0 * x), loaded.calls(x)[1], module.total(4.0 * x)

    for _ in range(10):
        found = [float(value[0, 0]) for value in mixed(tf.ones([100, 4]))]
        assert found == [2.0 * n, 4.0 * n, 6.0 * n, 8.0 * n]


def check_saved_models() -> None:
    """A Keras model with a collective, trained with our optimizer, is exported, saved and checkpointed."""
    import keras
    import tensorflow as tf

    import sparkvod.tensorflow as hvd

    rank = hvd.rank()
    if not hasattr(keras, "config"):
        return

    @keras.saving.register_keras_serializable("sparkvod_test")
    class Total(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return hvd.allreduce(x, op=hvd.Sum)

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), Total(), hvd.SyncBatchNormalization()])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2), "mse")
    model.fit(np.full((4, 3), rank + 1.0), np.ones((4, 2)), batch_size=2, verbose=0)
    hvd.broadcast_variables(model.weights, 0)
    x = np.ones((2, 3), "float32")
    expected = model(x)
    with _folder() as folder:
        if rank == 0:
            model.export(str(folder / "exported"), verbose=False)
            tf.saved_model.save(model, str(folder / "saved"))
            model.save(folder / "model.keras")
            model.save(folder / "model.h5")
            tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(folder / "checkpoint"))
        hvd.barrier()
        exported = tf.saved_model.load(str(folder / "exported"))
        saved = tf.saved_model.load(str(folder / "saved"))
        again = keras.saving.load_model(folder / "model.keras")
    np.testing.assert_allclose(exported.serve(x), expected, rtol=1e-5)
    (served,) = saved.signatures["serving_default"](tf.constant(x)).values()
    np.testing.assert_allclose(served, expected, rtol=1e-5)
    np.testing.assert_allclose(again(x), expected, rtol=1e-5)


SUITE = Suite([check_saved_functions, check_saved_models], setup=join, env=QUIET, timeout=120)


@pytest.mark.timeout(140)
@pytest.mark.parametrize("check", SUITE.names)
def test_saving(check: str) -> None:
    SUITE.verify(check, 3)
