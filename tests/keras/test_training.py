"""Keras 3 on several ranks, on each backend: equal weights, averaged metrics, warm-up, saving and loading."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contracts.worlds import Suite
from tests.keras.test_callbacks import check_schedule, join, quiet

pytest.importorskip("keras", reason="sparkvod.keras needs keras")


def check_fit() -> None:
    import keras

    import sparkvod.keras as hvd

    rank, n = hvd.rank(), hvd.size()
    keras.utils.set_random_seed(rank)
    values = np.random.default_rng(rank).normal(size=(32, 4)).astype("float32")
    for passes in (1, 2):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1), backward_passes_per_step=passes)
        model.compile(optimizer, "mse")
        told = model.fit(
            values,
            values[:, :3],
            batch_size=8,
            epochs=2,
            verbose=0,
            callbacks=[
                hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                hvd.callbacks.MetricAverageCallback(),
                hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2),
            ],
        ).history
        assert model.jit_compile == (keras.backend.backend() == "jax")
        by_rank = hvd.allgather_object([weight.tolist() for weight in model.get_weights()])
        assert all(weights == by_rank[0] for weights in by_rank)
        assert len(set(map(str, hvd.allgather_object(told["loss"])))) == 1
        np.testing.assert_allclose(told["lr"], [0.1 * (1 + (n - 1) / 2) / n, 0.1], rtol=1e-5)
        assert int(optimizer.iterations) == 8 // passes
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.keras")
            model.save(path)
            plain, again = keras.models.load_model(path), hvd.load_model(path)
        assert type(plain.optimizer).__name__ == "Adam"
        assert not hasattr(plain.optimizer, "_sparkvod")
        assert len(plain.optimizer.variables) == 2 + 2 * 2
        assert int(again.optimizer.iterations) == 8 // passes
        again.fit(values, values[:, :3], batch_size=32, epochs=1, verbose=0)


def check_resume() -> None:
    """Rank 0 loads the model, whose optimizer has variables, and the others build one, whose optimizer has none."""
    import keras

    import sparkvod.keras as hvd

    values = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")

    def fitted(model: Any) -> Any:
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(values, values[:, :3], batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[callback])
        return model

    def fresh(subclassed: bool = False) -> Any:
        layers = [keras.layers.Dense(3)] if subclassed else [keras.Input((4,)), keras.layers.Dense(3)]
        model = keras.Sequential(layers)  # without an Input it has no variables before it is called
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse")
        return model

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.keras")
        keras.utils.set_random_seed(hvd.rank())
        fitted(fresh()).save(path)
        uninterrupted = fitted(hvd.load_model(path)).get_weights()
        keras.utils.set_random_seed(hvd.rank() + 10)
        model = fitted(hvd.load_model(path) if hvd.rank() == 0 else fresh())
        # The first step is already that of the loaded model on all ranks.
        for weight, expected in zip(model.get_weights(), uninterrupted, strict=True):
            np.testing.assert_allclose(weight, expected, rtol=1e-6)
        assert int(model.optimizer.iterations) == 4
        late = fitted(hvd.load_model(path) if hvd.rank() == 0 else fresh(subclassed=True))
        mine = [keras.ops.convert_to_numpy(variable).tolist() for variable in late.optimizer.variables]
        assert all(theirs == mine for theirs in hvd.allgather_object(mine))


def check_equals_one_process() -> None:
    """Ranks with parts of a batch end with the weights of one process that has the whole of it."""
    import keras

    import sparkvod.keras as hvd

    rank, n = hvd.rank(), hvd.size()
    values = np.random.default_rng(0).normal(size=(24, n, 4)).astype("float32")

    def fitted(optimizer: object, rows: np.ndarray, batch: int, together: int = 1) -> list[np.ndarray]:
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(2, trainable=False)]
        )
        model.compile(optimizer, "mse", steps_per_execution=together)
        model.fit(rows, rows[:, :2], batch_size=batch, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    Adam = keras.optimizers.Adam  # noqa: N806
    one = fitted(Adam(0.05), values.reshape(-1, 4), 8 * n)
    mine = np.ascontiguousarray(values[:, rank])
    for options, batch, together in (
        ({}, 8, 1 if keras.backend.backend() == "torch" else 3),
        ({"gradient_predivide_factor": 4.0, "groups": 2}, 8, 1),
        ({"backward_passes_per_step": 2, "average_aggregated_gradients": True}, 4, 1),
    ):
        many = fitted(hvd.DistributedOptimizer(Adam(0.05), **options), mine, batch, together)
        for ours, theirs in zip(many, one, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        optimizer = hvd.DistributedOptimizer(Adam(0.05), compression=compression)
        for ours, theirs in zip(fitted(optimizer, mine, 8), one, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=0.05)


def check_collectives() -> None:
    import keras

    import sparkvod.keras as hvd

    rank, n = hvd.rank(), hvd.size()
    numpy = keras.ops.convert_to_numpy
    for dtype in ("float32", "float16", "bfloat16", "int32"):
        value = keras.ops.cast(np.arange(6.0).reshape(3, 2) * (rank + 1), dtype)
        total = np.arange(6.0).reshape(3, 2) * sum(range(1, n + 1))
        summed = hvd.allreduce(value, op=hvd.Sum)
        assert keras.backend.standardize_dtype(summed.dtype) == dtype
        np.testing.assert_array_equal(numpy(summed).astype("float64"), total)
        rows = 3 // n + (rank < 3 % n)
        first = sum(3 // n + (r < 3 % n) for r in range(rank))
        scattered = numpy(hvd.reducescatter(value, op=hvd.Sum)).astype("float64")
        np.testing.assert_array_equal(scattered, total[first : first + rows])
        gathered = numpy(hvd.allgather(value[:rank])).astype("float64")
        np.testing.assert_array_equal(
            gathered, np.concatenate([np.arange(6.0).reshape(3, 2)[:r] * (r + 1) for r in range(n)])
        )
        spread = numpy(hvd.broadcast(value, n - 1)).astype("float64")
        np.testing.assert_array_equal(spread, np.arange(6.0).reshape(3, 2) * n)
    assert float(numpy(hvd.allreduce(float(rank), prescale_factor=2.0))) == n - 1
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)
    variable = keras.Variable([float(rank)])
    hvd.broadcast_variables([variable], n - 1)
    assert numpy(variable)[0] == n - 1


def check_compiled_collectives() -> None:
    """Collectives and their derivatives in code that JAX compiles; the others have tests of their front ends."""
    import keras

    if keras.backend.backend() != "jax":
        return
    import jax
    from jax import numpy as jnp

    import sparkvod.keras as hvd

    rank, n = hvd.rank(), hvd.size()
    x = jnp.arange(2.0 * n)

    @jax.jit
    def run(x: jax.Array) -> list[jax.Array]:
        first = hvd.allreduce(x * (rank + 1), op=hvd.Sum)
        return [
            first,
            hvd.allreduce(first, prescale_factor=2.0),
            hvd.reducescatter(x, op=hvd.Sum),
            hvd.alltoall(x),
            hvd.broadcast(x * rank, n - 1),
        ]

    total = np.arange(2.0 * n) * n * (n + 1) / 2
    mine = np.arange(2.0 * rank, 2.0 * rank + 2)
    for _ in range(2):
        for found, expected in zip(
            run(x), [total, 2 * total, n * mine, np.tile(mine, n), np.arange(2.0 * n) * (n - 1)], strict=True
        ):
            np.testing.assert_allclose(found, expected, rtol=1e-6)
    grad = jax.jit(jax.grad(lambda x: (hvd.allreduce(x, op=hvd.Sum) * (rank + 1)).sum()))(x)
    np.testing.assert_allclose(grad, np.full(2 * n, n * (n + 1) / 2))
    grad = jax.jit(jax.grad(lambda x: (hvd.reducescatter(x) * (rank + 1)).sum()))(x)
    np.testing.assert_allclose(grad, np.repeat(np.arange(n) + 1.0, 2))


def check_compiled_rows() -> None:
    """Allgather and alltoall in code that JAX compiles: alike on all ranks; what is not is an error on each."""
    import keras

    if keras.backend.backend() != "jax":
        return
    import jax
    from jax import numpy as jnp

    import sparkvod.keras as hvd
    from sparkvod.errors import MismatchError

    rank, n = hvd.rank(), hvd.size()
    x = jnp.arange(6.0).reshape(3, 2) + 10 * rank
    by_rank = [np.arange(6.0).reshape(3, 2) + 10 * r for r in range(n)]
    # Rank r gets r rows of each rank's, and some are sent to nobody.
    splits = [min(r, 2) for r in range(n)]
    first = sum(splits[:rank])

    @jax.jit
    def run(x: jax.Array) -> list[jax.Array]:
        gathered, scalars = hvd.grouped_allgather([x, x[0, 0]])
        received, counts = hvd.alltoall(x, splits)
        return [gathered * 2.0, scalars, received + 1.0, counts]

    for _ in range(2):
        gathered, scalars, received, counts = run(x)
        np.testing.assert_array_equal(gathered, 2 * np.concatenate(by_rank))
        np.testing.assert_array_equal(scalars, 10.0 * np.arange(n))
        expected = [values[first : first + splits[rank]] for values in by_rank]
        np.testing.assert_array_equal(received, np.concatenate(expected) + 1)
        assert list(counts) == [splits[rank]] * n
    steps = jnp.arange(6.0).reshape(3, 2) + rank
    total, found = jax.jit(
        lambda steps: jax.lax.scan(
            lambda carry, step: (carry + hvd.allreduce(step, op=hvd.Sum), hvd.allgather(step)), jnp.zeros(2), steps
        )
    )(steps)
    np.testing.assert_array_equal(total, n * np.array([6.0, 9.0]) + 3 * sum(range(n)))
    np.testing.assert_array_equal(found, np.concatenate([np.arange(6.0).reshape(3, 2) + r for r in range(n)], axis=1))
    weights = np.arange(6.0 * n).reshape(-1, 2)
    grad = jax.jit(jax.grad(lambda x: (hvd.allgather(x) * weights).sum()))(x)
    np.testing.assert_allclose(grad, weights[3 * rank : 3 * rank + 3])
    grad = jax.jit(jax.grad(lambda x: (hvd.alltoall(x, splits)[0] * (rank + 1)).sum()))(x)
    sent = np.repeat(np.arange(n) + 1.0, splits)
    np.testing.assert_allclose(grad, np.repeat([*sent, *[0.0] * (3 - len(sent))], 2).reshape(3, 2))
    with pytest.raises(ValueError, match=f"a number of rows for each of {n} ranks"):
        jax.jit(lambda x: hvd.alltoall(x, [1] * (n + 1)))(x)
    with pytest.raises(ValueError, match="splits that JAX traces"):
        jax.jit(hvd.alltoall)(x, jnp.ones(n, "int32"))
    if n > 1:
        uneven = jnp.ones((2 if rank == 1 else 3, 2))
        for call, rows in (
            (hvd.allgather, uneven),
            (jax.grad(lambda x: hvd.allgather(x).sum()), uneven),
            (hvd.alltoall, jnp.ones(((1 + rank) * n, 2))),
            (lambda x: hvd.alltoall(x, [rank] * n)[0], jnp.ones((n * n, 2))),
        ):
            with pytest.raises(MismatchError, match="pad to the same rows"), hvd.own_errors():
                jax.block_until_ready(jax.jit(call)(rows))
            hvd.barrier()


def check_local_layers() -> None:
    """A layer that stays each rank's own is neither reduced nor broadcast."""
    import keras

    import sparkvod.keras as hvd

    rank, n = hvd.rank(), hvd.size()
    with pytest.raises(ValueError, match="without variables"):
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=keras.layers.Dense(1))
    for options, scale in (({}, 1 / n), ({"scale_local_gradients": False}, 1)):
        data = keras.Input((1,))
        shared, local = (keras.layers.Dense(1, use_bias=False, name=name) for name in ("shared", "local"))
        model = keras.Model(data, keras.layers.Add()([shared(data), local(data)]))
        for layer in (shared, local):
            layer.set_weights([np.full((1, 1), float(rank))])
        # The gradient of both is what the rank's rows are.
        optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=[local], **options)
        model.compile(optimizer, lambda _, predicted: keras.ops.mean(predicted))
        rows = np.full((2, 1), rank + 1.0, "float32")
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(n - 1, local_variables=local.trainable_variables)
        model.fit(rows, rows, batch_size=2, verbose=0, callbacks=[callback])
        np.testing.assert_allclose(shared.get_weights()[0], n - 1 - (n + 1) / 2, rtol=1e-6)
        np.testing.assert_allclose(local.get_weights()[0], rank - (rank + 1) * scale, rtol=1e-6, atol=1e-6)
    late = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    late.register_local_var(local.kernel)
    shared.set_weights([np.full((1, 1), float(rank))])
    kept = local.get_weights()[0]
    late.set_model(model)
    late.on_train_begin()
    np.testing.assert_array_equal(local.get_weights()[0], kept)
    assert shared.get_weights()[0][0, 0] == 0


def check_load_model() -> None:
    """Loading distributes what was compiled with a plain optimizer, known to Keras or not; and asks for no XLA."""
    import keras

    import sparkvod.keras as hvd

    rank, n = hvd.rank(), hvd.size()

    class Mine(keras.optimizers.SGD):
        pass

    def doubled(x: Any) -> Any:
        return 2.0 * x

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, activation=doubled)])
    jit = keras.backend.backend() == "jax"
    model.compile(Mine(0.5), "mean_absolute_error", jit_compile=jit or keras.backend.backend() == "tensorflow")
    model.set_weights([np.full((1, 1), 4.0)])
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.keras")
        model.save(path)
        again = hvd.load_model(path, [Mine], {"doubled": doubled}, hvd.Compression.fp16)
    assert isinstance(again.optimizer, Mine)
    assert again.jit_compile == jit
    if keras.backend.backend() == "tensorflow":  # of a model that another process has saved
        assert keras.saving.get_registered_object("sparkvod>SyncBatchNormalization")
    with pytest.raises(ValueError, match="already distributed"):
        hvd.DistributedOptimizer(again.optimizer)
    again.fit(np.full((2, 1), rank + 1.0), np.zeros((2, 1)), batch_size=2, verbose=0)
    np.testing.assert_allclose(again.get_weights()[0], 4.0 - 0.5 * (n + 1), rtol=1e-3)
    drops = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5, seed=rank), keras.layers.Dense(2)])
    hvd.broadcast_variables(drops.variables, 0)
    by_rank = hvd.allgather_object([keras.ops.convert_to_numpy(v).tolist() for v in drops.variables])
    assert all(theirs == by_rank[0] for theirs in by_rank)


def check_process_sets() -> None:
    """Ranks of a set train together, with the callbacks; a rank outside is refused, and may train alone."""
    import keras

    import sparkvod.keras as hvd
    from sparkvod.errors import MismatchError

    rank, n = hvd.rank(), hvd.size()
    members = hvd.add_process_set([0, 2]) if n > 2 else hvd.add_process_set([1]) if n > 1 else hvd.global_process_set
    root = members.ranks[-1]
    if members.included():
        keras.utils.set_random_seed(rank)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=members), "mse")
        rows = np.random.default_rng(rank).normal(size=(16, 4)).astype("float32")
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(root, process_set=members),
            hvd.callbacks.MetricAverageCallback(process_set=members),
        ]
        told = model.fit(rows, rows[:, :3], batch_size=8, epochs=2, verbose=0, callbacks=callbacks).history["loss"]
        mine = [told, [weight.tolist() for weight in model.get_weights()]]
        by_rank = hvd.allgather_object(mine, process_set=members)
        assert all(theirs == by_rank[0] for theirs in by_rank)
        variable = keras.Variable([float(rank)])
        hvd.broadcast_variables([variable], root, process_set=members)
        assert float(keras.ops.convert_to_numpy(variable)[0]) == root
    else:
        for what, call in {
            "DistributedOptimizer": lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=members),
            "broadcast_variables": lambda: hvd.broadcast_variables([], 0, process_set=members),
        }.items():
            with pytest.raises(ValueError, match=f"{what} was asked for on rank {rank} with the process set of"):
                call()
    hvd.barrier()
    if n > 1:
        assert hvd.remove_process_set(members)
        with pytest.raises(MismatchError, match="rank 0 has 1 variables, rank 1 has 2"):
            hvd.broadcast_variables([keras.Variable(0.0)] * (1 + (rank == 1)), 0)


def check_bad_arguments() -> None:
    import keras

    import sparkvod.keras as hvd

    for options, match in (
        ({"op": hvd.Adasum}, "Average or Sum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
        ({"groups": "all"}, "groups"),
    ):
        with pytest.raises(ValueError, match=match):
            hvd.DistributedOptimizer(keras.optimizers.SGD(), **options)
    with pytest.raises(ValueError, match="already distributed"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD()))
    with pytest.raises(ValueError, match="optimizer of Keras"):
        hvd.DistributedOptimizer("sgd")
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with pytest.raises(ValueError, match="a LossScaleOptimizer was expected"):
            hvd.DistributedOptimizer(keras.optimizers.SGD())
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
        if keras.backend.backend() == "jax":
            with pytest.raises(ValueError, match="mixed_bfloat16"):
                hvd.DistributedOptimizer(scaled)
        else:
            assert isinstance(hvd.DistributedOptimizer(scaled), keras.optimizers.LossScaleOptimizer)
    finally:
        keras.config.set_dtype_policy("float32")


def check_synchronized_batch_normalization() -> None:
    """Keras would synchronise it over the replicas of tf.distribute alone: refused by name before training."""
    import keras

    import sparkvod.keras as hvd

    if keras.backend.backend() != "tensorflow":
        return
    inner = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(synchronized=True, name="inside")])
    model = keras.Sequential([keras.Input((4,)), inner, keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    rows, callbacks = np.ones((4, 4), "float32"), [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    with pytest.raises(ValueError, match=r"BatchNormalization 'inside' has synchronized=True"):
        model.fit(rows, rows[:, :1], verbose=0, callbacks=callbacks)
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        with pytest.raises(ValueError, match=r"BatchNormalization 'inside' has synchronized=True"):
            hvd.load_model(f"{folder}/model.keras")
    inner.layers[0].synchronized = False
    model.fit(rows, rows[:, :1], verbose=0, callbacks=callbacks)


def check_errors_in_fit() -> None:
    """Ranks whose models differ get sparkvod's error from fit, on every backend."""
    import keras

    import sparkvod.keras as hvd
    from sparkvod.errors import MismatchError

    if hvd.size() == 1:
        return
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2 + hvd.rank())])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), lambda _, y: keras.ops.mean(y))
    rows = np.ones((4, 4), dtype="float32")
    with pytest.raises(MismatchError, match=r"rank 1 sent .*float32 \[3\]"), hvd.own_errors():
        model.fit(rows, rows, batch_size=4, verbose=0)


CHECKS = [
    check_fit,
    check_resume,
    check_equals_one_process,
    check_collectives,
    check_compiled_collectives,
    check_compiled_rows,
    check_local_layers,
    check_load_model,
    check_process_sets,
    check_bad_arguments,
    check_schedule,
    check_synchronized_batch_normalization,
    check_errors_in_fit,
]
SUITES = {
    backend: Suite(CHECKS, setup=join, env=quiet(backend), timeout=200) for backend in ("tensorflow", "torch", "jax")
}
USUAL = {("tensorflow", 2), ("torch", 2), ("jax", 3)}


@pytest.mark.timeout(220)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("backend", list(SUITES))
@pytest.mark.parametrize("check", SUITES["jax"].names)
def test_training(check: str, backend: str, size: int, leave_to_full: Callable[[str], None]) -> None:
    pytest.importorskip(backend, reason=f"this backend needs {backend}")
    if (backend, size) not in USUAL:
        leave_to_full("another number of ranks shows it")
    SUITES[backend].verify(check, size)
