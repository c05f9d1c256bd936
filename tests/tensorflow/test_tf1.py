"""Optimizers and hooks of TF1, in a session, and where TensorFlow runs functions or eagerly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.contracts.worlds import Suite
from tests.tensorflow.test_contract import QUIET
from tests.tensorflow.test_training import join

pytest.importorskip("tensorflow", reason="the TensorFlow front end needs tensorflow")


def check_tf1_graph() -> None:
    import tensorflow as tf

    import sparkvod.tensorflow as hvd

    rank, n = hvd.rank(), hvd.size()
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("v", initializer=float(rank))
        optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0))
        assert isinstance(optimizer, tf.compat.v1.train.GradientDescentOptimizer)
        step = optimizer.minimize(variable * (rank + 1.0))
        hook = hvd.BroadcastGlobalVariablesHook(n - 1)
        with tf.compat.v1.train.SingularMonitoredSession(hooks=[hook]) as session:
            assert session.run(variable) == n - 1
            session.run(step)
            np.testing.assert_allclose(session.run(variable), n - 1 - (np.arange(n) + 1.0).mean(), rtol=1e-6)


def check_broadcasts() -> None:
    """In a graph each broadcast of variables gives the root's values; of different numbers it says so on all ranks."""
    import tensorflow as tf

    import sparkvod.tensorflow as hvd
    from sparkvod.errors import MismatchError

    rank, n, v1 = hvd.rank(), hvd.size(), tf.compat.v1
    for resource in (True, False):
        with tf.Graph().as_default(), v1.Session() as session:
            variables = [
                v1.get_variable(f"v{k}", initializer=np.full(3, rank + 10.0 * k), use_resource=resource) for k in (0, 1)
            ]
            start = v1.global_variables_initializer()
            # All in one graph, where their names must not meet.
            in_place = hvd.broadcast_(variables, n - 1)
            named = hvd.broadcast_(variables, 0, name="named")
            plain = hvd.broadcast_variables(variables, n - 1)
            of_all = hvd.broadcast_global_variables(0)
            for update, root in ((in_place, n - 1), (named, 0), (plain, n - 1), (of_all, 0)):
                session.run(start)
                returned = session.run(update)
                kept = session.run(variables)
                for values in (kept,) if returned is None else (kept, returned):
                    np.testing.assert_array_equal(values, [[root] * 3, [root + 10] * 3])
            session.run(hvd.broadcast_variables([], 0))
            for fewer in (0, 1) if n > 1 else ():
                uneven = hvd.broadcast_variables(variables[: fewer + (rank == 1)], 0)
                with (
                    pytest.raises(
                        MismatchError, match=rf"one element per variable and one more.*rank 1 sent .*\[{fewer + 2}\]"
                    ),
                    hvd.own_errors(),
                ):
                    session.run(uneven)
    variable = tf.Variable(float(rank))

    @tf.function
    def run(variables: list[Any]) -> None:
        hvd.broadcast_variables(variables, n - 1)

    run([variable])
    assert float(variable) == n - 1
    run([])
    for fewer in (0, 1) if n > 1 else ():
        match = rf"one element per variable and one more.*rank 1 sent .*\[{fewer + 2}\]"
        with pytest.raises(MismatchError, match=match), hvd.own_errors():
            run([variable] * (fewer + (rank == 1)))


def check_tf1_passes() -> None:
    """An optimizer of TF1 sums gradients between steps: in a session, in a function and eagerly."""
    import tensorflow as tf

    import sparkvod.tensorflow as hvd

    v1 = tf.compat.v1
    rank, n = hvd.rank(), hvd.size()

    def made(average: bool, **options: Any) -> Any:
        plain = v1.train.MomentumOptimizer(1.0, 0.5)
        options |= {"backward_passes_per_step": 3, "average_aggregated_gradients": average}
        return hvd.DistributedOptimizer(plain, **options)

    def expected(average: bool, seen: list[int]) -> list[float]:
        # What passes with the factors 1, 2, ... leave of zeros: the vector, and two rows of the table.
        found, momentum = np.zeros(3), np.zeros(3)
        for first in range(0, len(seen) - 2, 3):
            factor = sum(seen[first : first + 3]) / (3 if average else 1)
            grad = factor * np.array([(n + 1) / 2, 1 / n, 1.0])
            momentum = 0.5 * momentum + grad
            found = found - momentum
        return list(found)

    def told(weights: Any, table: Any) -> list[float]:
        return [float(weights[1]), float(table[rank]), float(table[n])]

    def losses(weights: Any, table: Any, factor: Any) -> Any:
        return factor * (tf.reduce_sum(weights) * (rank + 1.0) + tf.reduce_sum(tf.gather(table, [rank, n])))

    for average in (False, True):
        with tf.Graph().as_default():
            weights = v1.get_variable("w", initializer=np.zeros(2, "float32"))
            table = v1.get_variable("t", initializer=np.zeros(n + 1, "float32"))
            unused = v1.get_variable("u", initializer=0.0)
            factor = v1.placeholder(tf.float32, [])
            optimizer, steps = made(average), v1.train.get_or_create_global_step()
            pairs = optimizer.compute_gradients(losses(weights, table, factor), [weights, table, unused])
            assert pairs[2][0] is None
            step = optimizer.apply_gradients(pairs, global_step=steps)
            assert len(v1.trainable_variables()) == 3
            assert not [v for v in v1.global_variables() if "accumulated" in v.name]
            with v1.Session() as session:
                session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
                for number in range(1, 9):
                    session.run(step, {factor: number})
                    seen = list(range(1, number + 1))
                    found = told(*session.run([weights, table]))
                    np.testing.assert_allclose(found, expected(average, seen), rtol=1e-5)
                assert session.run(steps) == 2
        for wrap in (lambda call: call, lambda call: tf.function(call, autograph=False)):
            weights, table = tf.Variable(tf.zeros(2)), tf.Variable(tf.zeros(n + 1))
            optimizer = made(average)

            def run(number: Any, weights: Any = weights, table: Any = table, optimizer: Any = optimizer) -> None:
                optimizer.minimize(lambda: losses(weights, table, number), var_list=[weights, table])

            run = wrap(run)
            for number in range(1, 9):
                run(tf.constant(float(number)))
                seen = list(range(1, number + 1))
                np.testing.assert_allclose(told(weights, table), expected(average, seen), rtol=1e-5)
    with pytest.raises(ValueError, match="backward_passes_per_step=0"):
        hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=0)


SUITE = Suite([check_tf1_graph, check_broadcasts, check_tf1_passes], setup=join, env=QUIET, timeout=200)


@pytest.mark.timeout(220)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("check", SUITE.names)
def test_tf1(check: str, size: int) -> None:
    SUITE.verify(check, size)
