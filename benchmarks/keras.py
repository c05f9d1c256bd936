"""A Keras MLP and a small CNN on 2 ranks of one thread, beside ``tf.distribute.MultiWorkerMirroredStrategy``.

Both train the same model from the same weights on the same batches, in the same two processes and by the same loop: one
``tf.function`` per step. (``model.fit`` of Keras 3 does not run under that strategy; ours is measured too, by itself,
and so is the loop of ranks that do not communicate.)

Then ``KerasModel.transform`` of the same two models, as ``keras_transform.py`` says.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.harness import MIN_ROUNDS, Report, alternate

TIMES = 1.2  # promised
RANKS, BATCH, VERIFIED, RATE = 2, 32, 10, 0.05  # the batch is Keras's default
# Shape of a sample, and steps of a round.
CASES = {"MLP": ((784,), 100), "CNN": ((28, 28, 1), 50)}
OURS, FIT, PEER = "sparkvod", "sparkvod, model.fit, 10 steps at a time", "MultiWorkerMirroredStrategy"
LIMIT = "no communication"


def network(name: str) -> Any:
    """Returns the model: 235,146 weights, or 56,714."""
    import keras

    layers = keras.layers
    hidden = {
        "MLP": [layers.Dense(256, activation="relu"), layers.Dense(128, activation="relu")],
        "CNN": [
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
        ],
    }[name]
    return keras.Sequential([keras.Input(CASES[name][0]), *hidden, layers.Dense(10)])


def training(model: Any, optimizer: Any) -> Callable[..., Any]:
    """Returns one step as a ``tf.function`` of a batch, whose loss is the mean over the rank's rows."""
    import keras
    import tensorflow as tf

    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of(y, model(x, training=True)))
        variables = [variable.value for variable in model.trainable_variables]
        optimizer.apply(tape.gradient(loss, variables), model.trainable_variables)
        return loss

    return step


def free_ports(count: int) -> list[int]:
    """Returns ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def in_rank(ports: list[int], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Measures on each rank; returns samples per second of both ranks together, by case and subject."""
    from sparkvod.launch import context

    world = context.current()
    assert world is not None
    workers = [f"127.0.0.1:{port}" for port in ports]
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": world.rank}}
    )
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    # It must be there before anything else runs.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    if strategy.num_replicas_in_sync != RANKS:
        raise AssertionError(f"the strategy has {strategy.num_replicas_in_sync} replicas, {RANKS} were expected")
    import sparkvod.keras as hvd

    hvd.init()
    return {name: case(name, strategy, rounds) for name in CASES}


def case(name: str, strategy: Any, rounds: int) -> dict[str, list[float]]:
    """Verifies and measures one model."""
    import time

    import keras
    import numpy as np
    import tensorflow as tf

    import sparkvod.keras as hvd
    import sparkvod.tensorflow as hvd_tf

    shape, steps = CASES[name]
    random = np.random.default_rng(hvd.rank())
    x = random.normal(size=(steps * BATCH, *shape)).astype("float32")
    y = random.integers(0, 10, steps * BATCH)
    batches = [(tf.constant(x[at : at + BATCH]), tf.constant(y[at : at + BATCH])) for at in range(0, len(x), BATCH)]

    # The strategy sums gradients, ours averages them.
    with strategy.scope():
        theirs, their_optimizer = network(name), keras.optimizers.SGD(RATE / RANKS)
        their_optimizer.build(theirs.trainable_variables)
    their_step = training(theirs, their_optimizer)
    ours, fitted, alone = (network(name) for _ in range(3))
    plain_optimizer = keras.optimizers.SGD(RATE)
    plain_optimizer.build(alone.trainable_variables)
    our_optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(RATE))
    our_optimizer.build(ours.trainable_variables)
    hvd.broadcast_variables(ours.weights, 0)
    for model in (theirs, fitted):
        model.set_weights(ours.get_weights())
    fitted.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(RATE)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=10,
    )
    mirrored = tf.function(lambda x, y: strategy.run(their_step, (x, y)))
    distributed = tf.function(training(ours, our_optimizer))

    def fit(count: int) -> None:
        data = tf.data.Dataset.from_tensor_slices((x[: count * BATCH], y[: count * BATCH])).batch(BATCH).prefetch(2)
        fitted.fit(data, epochs=1, verbose=0)

    def loop(step: Callable[..., Any]) -> Callable[[int], None]:
        def run(count: int) -> None:
            for batch in batches[:count]:
                loss = step(*batch)
            loss.numpy() if hasattr(loss, "numpy") else strategy.experimental_local_results(loss)[0].numpy()

        return run

    subjects = {
        OURS: loop(distributed),
        FIT: fit,
        PEER: loop(mirrored),
        LIMIT: loop(tf.function(training(alone, plain_optimizer))),
    }
    for run in subjects.values():
        run(VERIFIED)
    for model, who in ((ours, OURS), (fitted, FIT)):
        for found, expected in zip(model.get_weights(), theirs.get_weights(), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4, err_msg=f"{name} of {who} and {PEER}")
        by_rank = hvd.allgather_object([weight.tobytes() for weight in model.get_weights()])
        if by_rank[0] != by_rank[-1]:
            raise AssertionError(f"{name}: the ranks' weights differ")

    def timed(run: Callable[[int], None]) -> float:
        hvd_tf.barrier()
        began = time.perf_counter()
        run(steps)
        hvd_tf.barrier()
        return RANKS * BATCH * steps / (time.perf_counter() - began)

    measures: Mapping[str, Callable[[], float]] = {who: (lambda run=run: timed(run)) for who, run in subjects.items()}
    for measure in measures.values():
        measure()
    return alternate(measures, rounds)


def run(report: Report) -> None:
    """Measures samples per second of both, and then ``transform``."""
    import sparkvod
    from benchmarks import keras_transform

    env = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    rounds = MIN_ROUNDS if report.quick else 15
    found = sparkvod.run_local(in_rank, (free_ports(RANKS), rounds), np=RANKS, env=env, verbose=0, timeout=600)[0]
    for name, values in found.items():
        case_name = f"{name}, batch {BATCH} per rank, {RANKS} ranks"
        report.add(case_name, values, "samples/s")
        report.require(f"{name}, times as fast", report.ratio(case_name, OURS, PEER), at_least=TIMES)
        report.notes[f"{name}, model.fit, times as fast"] = report.ratio(case_name, FIT, PEER)
    keras_transform.measure(report)
