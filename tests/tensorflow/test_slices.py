"""Gradients that are ``tf.IndexedSlices``, in every path: collectives, tapes, optimizers of Keras and of TF1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.contracts.worlds import Suite
from tests.tensorflow.test_contract import QUIET
from tests.tensorflow.test_training import join

pytest.importorskip("tensorflow", reason="the TensorFlow front end needs tensorflow")

ROWS = 8


def _slices(rank: int, dtype: str = "float32", index: str = "int32", shape: bool = True) -> Any:
    # Rank r has r rows, rank 0 none; one row is everybody's, and twice rank 2's.
    import tensorflow as tf

    indices = [rank, *[5] * (rank - 1)][:rank]
    values = np.arange(2.0 * rank).reshape(rank, 2) + rank
    return tf.IndexedSlices(
        tf.cast(tf.constant(values, shape=[rank, 2]), dtype),
        tf.constant(indices, index, shape=[rank]),
        tf.constant([ROWS, 2], index) if shape else None,
    )


def _dense(slices: Any) -> np.ndarray:
    found = np.zeros((ROWS, 2))
    np.add.at(found, np.asarray(slices.indices), np.asarray(slices.values, "float64"))
    return found


def check_collectives() -> None:
    import tensorflow as tf

    import sparkvod.tensorflow as hvd

    rank, n = hvd.rank(), hvd.size()
    total = sum(_dense(_slices(r)) for r in range(n))
    for dtype, index, shape in (("float32", "int32", True), ("float64", "int64", True), ("float16", "int64", False)):
        slices = _slices(rank, dtype, index, shape)

        def run(slices: Any = slices) -> list[Any]:
            return [
                hvd.allreduce(slices, op=hvd.Sum),
                hvd.allreduce(slices, name="slices"),
                hvd.allreduce(slices, op=hvd.Sum, compression=hvd.Compression.bf16),
                *hvd.grouped_allreduce([tf.ones([3]), slices, tf.constant(2.0), slices], op=hvd.Sum),
                *hvd.grouped_allreduce([slices, tf.ones([3])], name="group"),
            ]

        for call in (run, tf.function(run)):
            summed, mean, small, ones, again, twos, last, group, three = call()
            for found, scale in ((summed, 1), (mean, n), (small, 1), (again, 1), (last, 1), (group, n)):
                assert isinstance(found, tf.IndexedSlices)
                assert (found.values.dtype.name, found.indices.dtype.name) == (dtype, index)
                assert (found.dense_shape is not None) == shape
                np.testing.assert_allclose(_dense(found), total / scale, rtol=0.01)
            np.testing.assert_allclose(ones, np.full(3, n))
            np.testing.assert_allclose(three, np.ones(3))
            assert float(twos) == 2 * n
    # The gradient goes back to the rows that came from here.
    values = tf.Variable(_slices(rank).values)
    with tf.GradientTape() as tape:
        found = hvd.allreduce(tf.IndexedSlices(values, _slices(rank).indices), op=hvd.Sum)
        loss = tf.reduce_sum(found.values) * (rank + 1.0)
    np.testing.assert_allclose(tape.gradient(loss, values), np.full((rank, 2), (n + 1) / 2))


def check_tape() -> None:
    import tensorflow as tf

    import sparkvod.tensorflow as hvd

    rank, n = hvd.rank(), hvd.size()
    table, own, dense = (tf.Variable(tf.zeros([ROWS, 2])) for _ in range(3))
    mean, mine = np.zeros((ROWS, 2)), np.zeros((ROWS, 2))
    mine[rank], mine[5] = 1, mine[5] + 1
    for r in range(n):
        mean[r] += 1 / n
    mean[5] += 1
    for options, scale in (
        ({}, 1),
        ({"op": hvd.Sum}, n),
        ({"compression": hvd.Compression.fp16}, 1),
        ({"gradient_predivide_factor": 2.0}, 1),
        ({"groups": 2}, 1),
        ({"groups": [[table, dense]]}, 1),
        ({"scale_local_gradients": False}, 1),
    ):
        for as_dense in (False, True):

            def run(options: dict[str, Any] = options, as_dense: bool = as_dense) -> Any:
                with tf.GradientTape() as tape:
                    loss = sum(tf.reduce_sum(tf.gather(weights, [rank, 5])) for weights in (table, own))
                    loss += tf.reduce_sum(dense) * (rank + 1.0)
                tape = hvd.DistributedGradientTape(tape, sparse_as_dense=as_dense, **options)
                tape.register_local_source(own)
                return tape.gradient(loss, [table, own, dense])

            for call in (run, tf.function(run)):
                shared, local, other = call()
                assert isinstance(shared, tf.IndexedSlices) == (not as_dense or n == 1)
                np.testing.assert_allclose(tf.convert_to_tensor(shared), mean * scale, rtol=1e-3)
                divisor = n if options.get("scale_local_gradients", True) else 1
                np.testing.assert_allclose(tf.convert_to_tensor(local), mine / divisor, rtol=1e-6)
                np.testing.assert_allclose(other, np.full((ROWS, 2), (n + 1) / 2 * scale), rtol=1e-3)


def check_keras() -> None:
    """Ranks that train an embedding on parts of a batch end with what one process has."""
    import keras

    import sparkvod.tensorflow as hvd

    if not hasattr(keras, "config"):
        return
    rank, n = hvd.rank(), hvd.size()
    words = np.random.default_rng(0).integers(0, ROWS, (6, n, 3))

    def fitted(optimizer: Any, rows: np.ndarray, batch: int) -> list[np.ndarray]:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Embedding(ROWS, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
        model.compile(optimizer, "mse")
        model.fit(rows, rows[:, :1] * 0.5, batch_size=batch, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    # By SGD, which touches but the rows of a batch, as Adam does not.
    one = fitted(keras.optimizers.SGD(0.01), words.reshape(-1, 3), 2 * n)
    for options, batch in (
        ({}, 2),
        ({"sparse_as_dense": True, "groups": 1}, 2),
        ({"backward_passes_per_step": 2, "average_aggregated_gradients": True}, 1),
    ):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), **options)
        for ours, theirs in zip(fitted(optimizer, words[:, rank], batch), one, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def check_tf1() -> None:
    import tensorflow as tf

    import sparkvod.tensorflow as hvd

    v1 = tf.compat.v1
    rank, n = hvd.rank(), hvd.size()
    expected = np.zeros(ROWS)
    expected[:n] = -1 / n
    expected[5] -= 1
    for as_dense in (False, True):
        with tf.Graph().as_default():
            table = v1.get_variable("t", initializer=np.zeros(ROWS, "float32"))
            plain = v1.train.GradientDescentOptimizer(1.0)
            optimizer = hvd.DistributedOptimizer(plain, sparse_as_dense=as_dense)
            step = optimizer.minimize(tf.reduce_sum(tf.gather(table, [rank, 5])))
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                session.run(step)
                np.testing.assert_allclose(session.run(table), expected, rtol=1e-6)


SUITE = Suite([check_collectives, check_tape, check_keras, check_tf1], setup=join, env=QUIET, timeout=200)


@pytest.mark.timeout(220)
@pytest.mark.parametrize("check", SUITE.names)
def test_slices(check: str) -> None:
    SUITE.verify(check, 3)
