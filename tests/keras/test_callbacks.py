"""The callbacks of Keras: learning rates as the weights show that they were used, and the best model's file."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contracts.worlds import Suite

pytest.importorskip("keras", reason="sparkvod.keras needs keras")

STEPS, EPOCHS = 4, 3


def quiet(backend: str) -> dict[str, str]:
    """Returns the environment of ranks, the same for all suites of this room, whose ranks are the same processes."""
    threads = {"TF_NUM_INTEROP_THREADS": "2", "TF_NUM_INTRAOP_THREADS": "1"}
    return {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_ENABLE_X64": "1", **threads}


def join() -> None:
    import sparkvod.keras as hvd

    hvd.init()


def _sum_of_rates(callback: Any) -> tuple[float, list[float]]:
    # The loss is the model's one weight, so with SGD each step takes the learning rate from it.
    import keras

    import sparkvod.keras as hvd

    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), layer])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
    model.compile(optimizer, lambda _, predicted: keras.ops.mean(predicted))
    rows = np.ones((STEPS * 2, 1), dtype="float32")
    told = model.fit(rows, rows, batch_size=2, epochs=EPOCHS, verbose=0, callbacks=[callback])
    return -float(model.get_weights()[0][0, 0]), told.history["lr"]


def check_schedule() -> None:
    import sparkvod.keras as hvd

    Schedule = hvd.callbacks.LearningRateScheduleCallback  # noqa: N806
    for arguments, by_step in (
        ({"multiplier": 0.1}, lambda epoch, _: 0.2),
        ({"multiplier": lambda epoch: 1.0 + epoch}, lambda epoch, _: 2.0 * (1 + epoch)),
        ({"multiplier": lambda epoch: 1.0 + epoch, "staircase": False}, lambda e, batch: 2.0 * (1 + e + batch / STEPS)),
        ({"multiplier": lambda epoch: epoch, "start_epoch": 1, "end_epoch": 2}, lambda e, _: 2.0 if e else 0.5),
        (
            {"multiplier": lambda epoch: 1.0 + epoch, "staircase": False, "steps_per_epoch": 8},
            lambda epoch, batch: 2.0 * (1 + epoch + batch / 8),
        ),
    ):
        rates = [[by_step(epoch, batch) for batch in range(STEPS)] for epoch in range(EPOCHS)]
        total, told = _sum_of_rates(Schedule(initial_lr=2.0, **arguments))
        np.testing.assert_allclose(total, np.sum(rates), rtol=1e-5)
        np.testing.assert_allclose(told, [epoch[-1] for epoch in rates], rtol=1e-5)
    callback = Schedule(1.0, lambda epoch: 1.0, staircase=False)
    callback.set_params({"steps": None})
    with pytest.raises(ValueError, match="steps_per_epoch"):
        callback.on_train_batch_begin(0)


def check_warmup() -> None:
    import sparkvod.keras as hvd

    n = hvd.size()
    total, told = _sum_of_rates(hvd.callbacks.LearningRateWarmupCallback(1.0, warmup_epochs=2))
    done = [min((epoch + (batch + 1) / STEPS) / 2, 1.0) for epoch in range(EPOCHS) for batch in range(STEPS)]
    np.testing.assert_allclose(total, sum((1 + (n - 1) * part) / n for part in done), rtol=1e-5)
    np.testing.assert_allclose(told, [(1 + (n - 1) / 2) / n, 1.0, 1.0], rtol=1e-5)


def check_best_model() -> None:
    import keras

    import sparkvod.keras as hvd

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    with tempfile.TemporaryDirectory() as folder:
        for weights_only, mode, best in ((False, "auto", 1.0), (True, "auto", 1.0), (False, "max", 3.0)):
            callback = hvd.callbacks.BestModelCheckpoint("val_loss", mode=mode, save_weights_only=weights_only)
            # As an estimator does.
            callback.filepath = str(Path(folder) / Path(callback.filepath).name)
            callback.set_model(model)
            callback.on_train_begin()
            for epoch, value in enumerate([2.0, 1.0, 3.0]):
                model.set_weights([np.full((1, 1), value)])
                callback.on_epoch_end(epoch, {"val_loss": value})
            model.set_weights([np.zeros((1, 1))])
            if weights_only:
                model.load_weights(callback.filepath)
                assert model.get_weights()[0][0, 0] == best
            else:
                assert keras.models.load_model(callback.filepath).get_weights()[0][0, 0] == best


def check_mismatched_metrics() -> None:
    import sparkvod.keras as hvd
    from sparkvod.errors import MismatchError

    logs = {"loss": float(hvd.rank())}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {"loss": (hvd.size() - 1) / 2}
    if hvd.size() > 1:
        with pytest.raises(MismatchError, match=r"rank 0 has \['loss'\], rank 1 has \['accuracy'\]"):
            hvd.callbacks.MetricAverageCallback().on_epoch_end(0, {"accuracy" if hvd.rank() == 1 else "loss": 1.0})


CHECKS = [check_schedule, check_warmup, check_best_model, check_mismatched_metrics]
SUITE = Suite(CHECKS, setup=join, env=quiet("torch"), timeout=120)


@pytest.mark.timeout(140)
@pytest.mark.parametrize("check", SUITE.names)
def test_callbacks(check: str) -> None:
    pytest.importorskip("torch", reason="this backend needs torch")
    SUITE.verify(check, 2)
