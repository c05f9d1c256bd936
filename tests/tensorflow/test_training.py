"""Tapes, variables, sparse gradients and errors of the TensorFlow front end, in a world of ranks."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.contracts.worlds import Suite
from tests.tensorflow.test_contract import QUIET

pytest.importorskip("tensorflow", reason="the TensorFlow front end needs tensorflow")


def join() -> None:
    import sparkvod.tensorflow as hvd

    hvd.init()


def _loss(weights: Any, bias: Any, rank: int) -> Any:
    import tensorflow as tf

    return tf.reduce_sum(weights * (rank + 1.0)) + 2.0 * tf.reduce_sum(bias) * rank


def check_tape() -> None:
    import tensorflow as tf

    import sparkvod.tensorflow as hvd

    rank, n = hvd.rank(), hvd.size()
    weights, bias = tf.Variable(tf.ones([3, 2])), tf.Variable(1.0)
    unused = tf.Variable([1.0])
    mean = (np.arange(n) + 1.0).mean()
    for options, scale in (
        ({}, 1.0),
        ({"op": hvd.Sum}, n),
        ({"gradient_predivide_factor": 2.0}, 1.0),
        ({"groups": 2}, 1.0),
        ({"groups": [[bias, weights]]}, 1.0),
        ({"compression": hvd.Compression.fp16}, 1.0),
    ):

        def run(options: dict[str, Any] = options) -> Any:
            with tf.GradientTape(persistent=True) as tape:
                loss = _loss(weights, bias, rank)
            distributed = hvd.DistributedGradientTape(tape, **options)
            assert isinstance(distributed, tf.GradientTape)
            return distributed.gradient(loss, {"w": weights, "b": bias, "u": unused}), distributed.gradient(loss, bias)

        for step in (run, tf.function(run)):
            grads, single = step()
            np.testing.assert_allclose(grads["w"], np.full((3, 2), mean * scale), rtol=1e-6)
            np.testing.assert_allclose(grads["b"], 2 * (mean - 1) * scale, rtol=1e-6)
            np.testing.assert_allclose(single, 2 * (mean - 1) * scale, rtol=1e-6)
            assert grads["u"] is None
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0)
    for groups in ("all", [[weights], [bias, weights]]):
        with pytest.raises(ValueError, match="groups"):
            hvd.DistributedGradientTape(tf.GradientTape(), groups=groups)
    with pytest.raises(TypeError, match="GradientTape"):
        hvd.DistributedGradientTape(None)


def check_local_sources() -> None:
    import tensorflow as tf

    import sparkvod.tensorflow as hvd

    rank, n = hvd.rank(), hvd.size()
    weights, bias = tf.Variable(tf.ones([2])), tf.Variable(1.0)
    for scaled in (True, False):
        with hvd.DistributedGradientTape(tf.GradientTape(), scale_local_gradients=scaled) as tape:
            loss = _loss(weights, bias, rank)
        tape.register_local_source(bias)
        shared, local = tape.gradient(loss, [weights, bias])
        np.testing.assert_allclose(shared, np.full(2, (np.arange(n) + 1.0).mean()), rtol=1e-6)
        np.testing.assert_allclose(local, 2.0 * rank / (n if scaled else 1), rtol=1e-6)
        assert tape.get_local_and_global_gradients([1, 2], [weights, bias]) == ([2], [1])
    layer = tf.keras.layers.Dense(1)
    with pytest.raises(ValueError, match="built"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=layer)
    layer.build((None, 2))
    with hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[layer]) as tape:
        loss = tf.reduce_sum(layer(tf.ones([1, 2]))) * (rank + 1.0)
    (grad, _) = tape.gradient(loss, layer.trainable_weights)
    np.testing.assert_allclose(grad, np.full((2, 1), (rank + 1.0) / n), rtol=1e-6)


def check_sparse_gradients() -> None:
    import tensorflow as tf

    import sparkvod.tensorflow as hvd

    rank, n = hvd.rank(), hvd.size()
    table = tf.Variable(tf.zeros([8, 2]))
    expected = np.zeros((8, 2))
    for r in range(n):
        expected[r] += 1.0 / n
        expected[5] += 1.0 / n

    def run(as_dense: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [rank, 5]))
        return hvd.DistributedGradientTape(tape, sparse_as_dense=as_dense).gradient(loss, table)

    for step in (run, tf.function(run)):
        sparse = step(False)
        assert n == 1 or isinstance(sparse, tf.IndexedSlices)
        np.testing.assert_allclose(tf.convert_to_tensor(sparse), expected, rtol=1e-6)
        np.testing.assert_allclose(tf.convert_to_tensor(step(True)), expected, rtol=1e-6)
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([rank]), tf.constant([8, 2]))
    summed = hvd.allreduce(slices, op=hvd.Sum)
    np.testing.assert_array_equal(summed.indices, np.arange(n))
    with pytest.raises(ValueError, match="IndexedSlices"):
        hvd.allreduce(slices, op=hvd.Max)
    with pytest.raises(ValueError, match="sparse_as_dense"):
        hvd.allreduce(slices, prescale_factor=2.0)


def check_variables() -> None:
    import tensorflow as tf

    import sparkvod.tensorflow as hvd
    from sparkvod.errors import MismatchError

    rank, n = hvd.rank(), hvd.size()
    variables = [tf.Variable([float(rank), 1.0]), tf.Variable(rank, dtype=tf.int64)]
    hvd.broadcast_variables(variables, n - 1)
    np.testing.assert_array_equal(variables[0], [n - 1.0, 1.0])
    assert int(variables[1]) == n - 1
    variables[1].assign(rank)
    hvd.broadcast_(variables, 0)
    assert int(variables[1]) == 0
    variables[1].assign(rank)
    tf.function(lambda: hvd.broadcast_variables(variables, n - 1))()
    assert int(variables[1]) == n - 1
    if n > 1:
        with pytest.raises(MismatchError, match=r"variable 0 rank 0 has float32 \[2\], rank 1 has float32 \[3\]"):
            hvd.broadcast_variables([tf.Variable(tf.zeros([3 if rank == 1 else 2]))], 0)
        with pytest.raises(MismatchError, match="rank 0 has 0 variables"):
            hvd.broadcast_variables([tf.Variable(1.0)] * (rank != 0), 0)
    assert hvd.broadcast_object_fn(root_rank=n - 1)({"rank": rank}) == {"rank": n - 1}
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)


def check_world_ops() -> None:
    import tensorflow as tf

    import sparkvod.tensorflow as hvd

    function = tf.function(lambda: (hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()))
    for found in (function(), function.python_function()):
        assert [int(number) for number in found] == [hvd.rank(), hvd.size(), hvd.rank(), hvd.size()]
    hvd.shutdown()
    with pytest.raises(ValueError, match="init"), hvd.own_errors():
        function()
    hvd.init()
    assert int(function()[1]) == hvd.size()
    assert int(hvd.process_set_included_op()) == 1


def check_functions_run_each_time() -> None:
    """Nothing is folded, merged or dropped: constants, equal operations, loops, results that nobody takes."""
    import tensorflow as tf

    import sparkvod.tensorflow as hvd

    n = hvd.size()

    @tf.function
    def run(x: Any) -> Any:
        folded = hvd.allreduce(tf.constant([1.0]), op=hvd.Sum)
        twice = hvd.allreduce(x, op=hvd.Sum) + hvd.allreduce(x, op=hvd.Sum)
        hvd.barrier()
        total = tf.zeros_like(x)
        for _ in tf.range(5):
            total = hvd.allreduce(total + 1.0, op=hvd.Average)
        many = tf.add_n([hvd.allreduce(x + float(k), op=hvd.Sum) for k in range(40)])
        return folded, twice, total, many

    def calls() -> int:
        return sum(row["tensors"] for key, row in hvd.stats()["collectives"].items() if key.startswith("allreduce"))

    run(tf.constant([1.0]))
    before = calls()
    folded, twice, total, many = run(tf.constant([2.0]))
    assert calls() - before == 1 + 2 + 5 + 40
    assert (float(folded[0]), float(twice[0]), float(total[0])) == (n, 4.0 * n, 5.0)
    assert float(many[0]) == n * (40 * 2 + sum(range(40)))


def check_process_sets_at_once() -> None:
    # A rank that is in two sets, with a thread for each, must name their operations as ranks that are in one do.
    import tensorflow as tf

    import sparkvod.tensorflow as hvd

    sets = [hvd.add_process_set([r, r + 1]) for r in range(hvd.size() - 1)] if hvd.size() > 2 else []
    mine = [members for members in sets if members.included()]

    def sums(members: Any) -> list[float]:
        ones = tf.ones([3])
        return [float(hvd.allreduce(ones, op=hvd.Sum, process_set=members)[0]) for _ in range(100)]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(sums, mine)) == [[2.0] * 100] * len(mine)
    hvd.barrier()
    for members in sets:
        assert hvd.remove_process_set(members)


def check_process_sets() -> None:
    """A set's ranks reduce, spread and ask for its size among themselves; a rank outside it is refused."""
    import tensorflow as tf

    import sparkvod.tensorflow as hvd

    rank, n = hvd.rank(), hvd.size()
    if n == 1:
        return
    members = hvd.add_process_set([0, n - 1])
    number = members.process_set_id
    asked = tf.function(lambda: (hvd.size_op(number), hvd.process_set_included_op(number)))
    for call in (asked, asked.python_function):
        assert [int(found) for found in call()] == [2, rank in members.ranks]
    weights, table = tf.Variable(tf.ones([3, 2])), tf.Variable(tf.zeros([8, 2]))

    def run(**options: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = _loss(weights, tf.zeros([]), rank) + tf.reduce_sum(tf.gather(table, [rank, 5]))
        tape = hvd.DistributedGradientTape(tape, process_set=members, **options)
        return tape.gradient(loss, [weights, table])

    with tf.Graph().as_default():
        plain = tf.compat.v1.train.GradientDescentOptimizer(1.0)
    if members.included():
        expected = np.zeros((8, 2))
        for other in members.ranks:
            expected[other] += 0.5
        expected[5] = 1.0
        for step in (run, tf.function(run)):
            dense, sparse = step()
            np.testing.assert_allclose(dense, np.full((3, 2), (n + 1) / 2), rtol=1e-6)
            np.testing.assert_allclose(tf.convert_to_tensor(sparse), expected, rtol=1e-6)
        variable = tf.Variable(float(rank))
        hvd.broadcast_variables([variable], n - 1, process_set=members)
        assert float(variable) == n - 1
        assert hvd.broadcast_object_fn(n - 1, process_set=members)(rank) == n - 1
        with pytest.raises(ValueError, match="root_rank=1 was found, one of the process set's ranks"):
            hvd.broadcast(variable, 1, process_set=members)
    else:
        outside = f"was asked for on rank {rank} with the process set of the ranks"
        for what, call in {
            "DistributedGradientTape": run,
            "DistributedOptimizer": lambda: hvd.DistributedOptimizer(plain, process_set=members),
            "broadcast_variables": lambda: hvd.broadcast_variables([weights], 0, process_set=members),
        }.items():
            with pytest.raises(ValueError, match=f"{what} {outside}"):
                call()
    hvd.barrier()
    assert hvd.remove_process_set(members)
    with pytest.raises(ValueError, match=f"process_set_id={number} was found"):
        hvd.size_op(number)


def check_errors_in_functions() -> None:
    import tensorflow as tf

    import sparkvod.tensorflow as hvd
    from sparkvod.errors import MismatchError

    compiled = tf.function(lambda x: hvd.allreduce(x), jit_compile=True)
    with pytest.raises(ValueError, match="jit_compile=False"), hvd.own_errors():
        compiled(tf.constant([1.0]))
    with pytest.raises(ValueError, match="complex64"):
        hvd.allreduce(tf.constant([1j], tf.complex64))
    if hvd.size() > 1:
        wrong = tf.function(lambda: hvd.allreduce(tf.zeros([2 + hvd.rank()]), name="wrong"))
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"rank 1 sent .*float32 \[3\]"):
            wrong()
        with pytest.raises(MismatchError, match=r"rank 1 sent .*float32 \[3\]"), hvd.own_errors():
            wrong()
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == hvd.size()


def check_keras_optimizer() -> None:
    import keras
    import tensorflow as tf

    import sparkvod.tensorflow as hvd

    if not hasattr(keras, "config"):
        with pytest.raises(ValueError, match=r"keras.optimizers \(Keras 3\)"):
            hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        return
    import sparkvod.tensorflow.keras as hvd_keras
    from sparkvod.tensorflow.keras import callbacks

    rank, n = hvd.rank(), hvd.size()
    assert hvd_keras.callbacks.MetricAverageCallback is callbacks.MetricAverageCallback
    assert hvd_keras.broadcast_object(rank, n - 1) == n - 1
    mean = (np.arange(n) + 1.0).mean()
    for options, scale in (
        ({}, mean),
        ({"op": hvd.Sum}, mean * n),
        ({"gradient_predivide_factor": 2.0}, mean),
        ({"groups": 1, "compression": hvd.Compression.fp16}, mean),
        ({"backward_passes_per_step": 2}, 2 * mean),
        ({"backward_passes_per_step": 2, "average_aggregated_gradients": True}, mean),
    ):
        passes = options.get("backward_passes_per_step", 1)
        weights = [keras.Variable([1.0, 2.0]), keras.Variable(0.0)]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), name="mine", **options)
        assert isinstance(optimizer, keras.optimizers.SGD)
        assert optimizer.name == "mine"
        optimizer.build(weights)
        step = tf.function(lambda optimizer=optimizer: optimizer.apply([tf.fill([2], rank + 1.0), rank + 1.0]))
        for number in range(2 * passes):
            (optimizer.apply if number % 2 else lambda grads, step=step: step())([tf.fill([2], rank + 1.0), rank + 1.0])
        np.testing.assert_allclose(weights[0], np.array([1.0, 2.0]) - 2 * scale, rtol=1e-5)
        np.testing.assert_allclose(weights[1], -2 * scale, rtol=1e-5)
    for wrong, match in (("sgd", "builtins.str was found"), (optimizer, "already distributed")):
        with pytest.raises(ValueError, match=match):
            hvd.DistributedOptimizer(wrong)
    with pytest.raises(ValueError, match="with an optimizer that has gradient_accumulation_steps=4"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=4), backward_passes_per_step=2)


def check_sync_batch_normalization() -> None:
    """Outputs, gradients and averages are those of one batch normalization of all ranks' rows."""
    import keras
    import tensorflow as tf

    import sparkvod.tensorflow as hvd

    rank, n = hvd.rank(), hvd.size()
    random = np.random.default_rng(7)
    for shape, options, masked in (
        ((5,), {}, False),
        ((4, 4, 3), {"axis": 1, "momentum": 0.5}, False),
        ((6, 3), {"scale": False}, True),
    ):
        # Unequal batches, of no rows on the last of three ranks, far from zero.
        rows = [3 * r + 2 if r < 2 else 0 for r in range(n)]
        batches = [random.normal(50.0 * r, 1.0 + r, (k, *shape)).astype("float32") for r, k in enumerate(rows)]
        factors = [random.normal(size=batch.shape).astype("float32") for batch in batches]
        masks = [random.random(batch.shape[:-1]) < 0.7 if masked else None for batch in batches]
        # Keras 2's fused one corrects the variance that it keeps for the number of rows.
        plain = {} if hasattr(keras, "config") else {"fused": False}
        layers = [hvd.SyncBatchNormalization(**options), keras.layers.BatchNormalization(**options, **plain)]

        def run(layer: Any, x: Any, factor: Any, mask: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                result = layer(x, training=True, mask=mask)
                loss = tf.reduce_sum(result * factor)
            return result, tape.gradient(loss, [x, *layer.trainable_weights])

        for layer in layers:
            layer.build((None, *shape))
        joined = np.concatenate(batches), np.concatenate(factors), np.concatenate(masks) if masked else None
        expected, (dx, *dweights) = run(layers[1], tf.constant(joined[0]), *joined[1:])
        mine = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
        for call in (run, tf.function(run)):
            found, (grad, *grads) = call(layers[0], tf.constant(batches[rank]), factors[rank], masks[rank])
            np.testing.assert_allclose(found, expected[mine], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(grad, dx[mine], rtol=1e-3, atol=1e-4)
            for ours, theirs in zip(grads, dweights, strict=True):
                np.testing.assert_allclose(hvd.allreduce(ours, op=hvd.Sum), theirs, rtol=1e-4, atol=1e-3)
            if call is run:
                for ours, theirs in zip(layers[0].weights, layers[1].weights, strict=True):
                    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    inferred = (1.0 - layers[0].moving_mean) / tf.sqrt(layers[0].moving_variance + 1e-3)
    np.testing.assert_allclose(layers[0](tf.ones([2, 6, 3]))[1, 5], inferred, rtol=1e-4)
    again = keras.layers.deserialize(keras.layers.serialize(layers[0]))
    assert isinstance(again, hvd.SyncBatchNormalization)
    assert again.scale is False
    if hasattr(keras, "config"):
        # With an optimizer that is not distributed, and asked to compile by XLA.
        model = keras.Sequential([keras.Input((3,)), hvd.SyncBatchNormalization(momentum=0.0), keras.layers.Dense(1)])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model.compile("sgd", "mse", jit_compile=True)
        assert "jit_compile" in str(told[0].message)
        model.fit(np.full((4, 3), 2.0 * rank), np.zeros((4, 1)), batch_size=4, verbose=0)
        np.testing.assert_allclose(model.layers[0].moving_mean, np.full(3, n - 1.0), rtol=1e-5)
    for options in ({"fused": True}, {"renorm": True}, {"synchronized": True}, {"axis": [1, 2]}):
        with pytest.raises(ValueError, match="was expected"):
            hvd.SyncBatchNormalization(**options)


SUITE = Suite(
    [
        check_tape,
        check_local_sources,
        check_sparse_gradients,
        check_variables,
        check_world_ops,
        check_functions_run_each_time,
        check_process_sets_at_once,
        check_process_sets,
        check_errors_in_functions,
        check_keras_optimizer,
        check_sync_batch_normalization,
    ],
    setup=join,
    env=QUIET,
    timeout=200,
)


@pytest.mark.timeout(220)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("check", SUITE.names)
def test_training(check: str, size: int) -> None:
    SUITE.verify(check, size)
