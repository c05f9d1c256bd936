"""Gradients through collectives: each has a name of its own, which is the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.contracts.worlds import Suite
from tests.tensorflow.test_contract import QUIET
from tests.tensorflow.test_training import join

pytest.importorskip("tensorflow", reason="the TensorFlow front end needs tensorflow")


def _collectives() -> dict[str, tuple[Callable[..., list[Any]], float]]:
    # Each makes two results of two tensors of equal shapes; the second number is the gradient of the results' sum.
    import sparkvod.tensorflow as hvd

    n = hvd.size()
    return {
        "allreduce": (lambda a, b: [hvd.allreduce(a, op=hvd.Sum), hvd.allreduce(b, op=hvd.Sum)], n),
        "named": (lambda a, b: [hvd.allreduce(a, name="first"), hvd.allreduce(b, name="second")], 1),
        "grouped_allreduce": (lambda a, b: hvd.grouped_allreduce([a, b], op=hvd.Sum), n),
        "allgather": (lambda a, b: [hvd.allgather(a), hvd.allgather(b)], 1),
        "grouped_allgather": (lambda a, b: hvd.grouped_allgather([a, b]), 1),
        "broadcast": (lambda a, b: [hvd.broadcast(a, 0), hvd.broadcast(b, 0)], float(hvd.rank() == 0)),
        "reducescatter": (lambda a, b: [hvd.reducescatter(a), hvd.reducescatter(b)], 1),
        "grouped_reducescatter": (lambda a, b: hvd.grouped_reducescatter([a, b]), 1),
        "alltoall": (lambda a, b: [hvd.alltoall(a), hvd.alltoall(b)], 1),
    }


def check_several_gradients_of_one_collective() -> None:
    """Two gradients of each collective in one function, and eagerly, are those of their own results."""
    import tensorflow as tf

    import sparkvod.tensorflow as hvd

    rank, n = hvd.rank(), hvd.size()
    values = tf.ones([n, 40])
    for name, (collective, factor) in _collectives().items():

        def gradients(a: Any, b: Any, collective: Any = collective) -> list[Any]:
            with tf.GradientTape(persistent=True) as tape:
                tape.watch([a, b])
                if rank == 1:  # by which TensorFlow could differentiate in another order
                    _ = a + b
                x, y = collective(a, b)
                doubled, tripled = 2.0 * y, 3.0 * x
            return [tape.gradient(x, a), tape.gradient(tripled, a), *tape.gradient([x, doubled, tripled], [a, b])]

        for run in (gradients, tf.function(gradients, autograph=False)):
            for _ in range(3):
                found = [float(grad[0, 0]) for grad in run(values, 2.0 * values)]
                expected = [factor, 3.0 * factor, 4.0 * factor, 2.0 * factor]
                np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=name)


def check_second_order() -> None:
    import tensorflow as tf

    import sparkvod.tensorflow as hvd

    n = hvd.size()

    def second(a: Any) -> list[Any]:
        with tf.GradientTape(persistent=True) as outer:
            outer.watch(a)
            with tf.GradientTape(persistent=True) as inner:
                inner.watch(a)
                total = hvd.allreduce(a, op=hvd.Sum)
                square, cube = total**2, total**3
            first = inner.gradient(square, a), inner.gradient(cube, a)
        return [outer.gradient(grad, a) for grad in first]

    for run in (second, tf.function(second, autograph=False)):
        for _ in range(3):
            square, cube = run(
                tf.ones([30])
            )  # of the sum n, with the derivative n: by the square 2 n^2, by the cube 6 n^3
            np.testing.assert_allclose(square, np.full(30, 2.0 * n * n), rtol=1e-6)
            np.testing.assert_allclose(cube, np.full(30, 6.0 * n**3), rtol=1e-6)


def check_one_function_called_often() -> None:
    """Calls of one function within another, and iterations of a loop, do not meet another rank's other call."""
    import tensorflow as tf

    import sparkvod.tensorflow as hvd

    n = hvd.size()
    weight = tf.Variable(1.0)

    @tf.function
    def total(a: Any) -> Any:
        return hvd.allreduce(weight * a, op=hvd.Sum)

    @tf.function
    def calls(a: Any) -> list[Any]:
        return [total(a), total(2.0 * a), total(3.0 * a)]

    @tf.function
    def gradients(a: Any) -> list[Any]:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(a)
            x = total(a)
            y = x**2
        return [tape.gradient(x, a), tape.gradient(y, a)]

    @tf.function
    def loop(rows: Any) -> Any:
        return tf.map_fn(lambda row: hvd.allreduce(row, op=hvd.Sum), rows, parallel_iterations=4)

    dataset = tf.data.Dataset.range(6).map(lambda number: hvd.allreduce(number, op=hvd.Sum))
    assert [int(number) for number in dataset] == [n * number for number in range(6)]
    rows = tf.range(6.0)[:, tf.newaxis] * tf.ones([1, 50])
    for _ in range(10):
        np.testing.assert_allclose([float(x[0]) for x in calls(tf.ones([500]))], [n, 2 * n, 3 * n], rtol=1e-6)
        first, second = gradients(tf.ones([500]))
        np.testing.assert_allclose([first[0], second[0]], [n, 2 * n * n], rtol=1e-6)
        np.testing.assert_allclose(loop(rows), n * rows, rtol=1e-6)


def check_gradient_of_a_loop() -> None:
    import tensorflow as tf

    import sparkvod.tensorflow as hvd

    rank, n = hvd.rank(), hvd.size()
    called = tf.function(lambda a: hvd.allreduce(a, op=hvd.Sum))
    on_root = float(rank == 0)
    for collective, expected in (
        (lambda a: hvd.allreduce(a, op=hvd.Sum), n**2),
        (called, n**2),
        (lambda a: hvd.allgather(a)[rank : rank + 1], 1 / n**2),
        (lambda a: hvd.broadcast(a, 0), on_root / n),
        (lambda a: hvd.reducescatter(tf.tile(a, [n, 1]), op=hvd.Sum), n**4),
        (lambda a: hvd.alltoall(tf.tile(a, [n, 1]))[:1], on_root * n),
    ):

        @tf.function
        def gradient(a: Any, collective: Any = collective) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(a)
                result = a
                for _ in tf.range(2):
                    result = tf.reshape(collective(result), [1, 3])
                loss = tf.reduce_sum(result)
            return tape.gradient(loss, a)

        np.testing.assert_allclose(gradient(tf.ones([1, 3])), np.full((1, 3), expected), rtol=1e-6)


def check_ragged_and_sparse() -> None:
    """They are refused by name before anything is sent: the next collective finds no rank waiting."""
    import tensorflow as tf

    import sparkvod.tensorflow as hvd

    ragged, sparse = tf.ragged.constant([[1.0], [2.0, 3.0]]), tf.sparse.from_dense([[0.0, 1.0]])
    for value, match in ((ragged, r"got a tf\.RaggedTensor of shape \(2, None\)"), (sparse, r"got a tf\.SparseTensor")):
        for call in (
            lambda value: hvd.allreduce(value),
            lambda value: hvd.grouped_allreduce([tf.ones(2), value]),
            lambda value: hvd.allgather(value),
            lambda value: hvd.broadcast(value, 0),
            lambda value: hvd.alltoall(value),
            lambda value: hvd.reducescatter(value),
        ):
            for run in (call, tf.function(call)):
                with pytest.raises(ValueError, match=match):
                    run(value)
    np.testing.assert_array_equal(hvd.allreduce(tf.ones(2)), [1.0, 1.0])


CHECKS = [
    check_several_gradients_of_one_collective,
    check_second_order,
    check_one_function_called_often,
    check_gradient_of_a_loop,
    check_ragged_and_sparse,
]
SUITE = Suite(CHECKS, setup=join, env={**QUIET, "SPARKVOD_COLLECTIVE_TIMEOUT": "30"}, timeout=120)


@pytest.mark.timeout(140)
@pytest.mark.parametrize("check", SUITE.names)
def test_gradients(check: str) -> None:
    SUITE.verify(check, 3)
