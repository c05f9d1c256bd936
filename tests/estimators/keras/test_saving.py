"""What of a KerasEstimator is no JSON is the same again after saving and loading."""

from __future__ import annotations

from typing import Any

import pytest

keras = pytest.importorskip("keras", reason="the Keras estimator needs keras")
pytest.importorskip(keras.backend.backend(), reason="Keras needs its backend")

from sparkvod.estimators import KerasEstimator  # noqa: E402
from sparkvod.keras.callbacks import BestModelCheckpoint  # noqa: E402


def doubled(y_true: Any, y_pred: Any) -> Any:
    return 2 * keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def bent(x: Any) -> Any:
    return keras.ops.maximum(x, 0.1 * x)


def test_params_that_are_objects() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, activation=bent)])
    model.compile(keras.optimizers.Adam(0.25), doubled)
    estimator = KerasEstimator(
        model=model,
        optimizer=keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.9), momentum=0.5),
        loss=[doubled, keras.losses.Huber(0.75)],
        metrics=[keras.metrics.AUC(num_thresholds=7), "mae"],
        callbacks=[keras.callbacks.EarlyStopping(patience=4)],
        checkpoint_callback=BestModelCheckpoint("loss"),
    )
    found = {
        name: estimator._load(name, estimator._dump(name, estimator.value(name)))
        for name in ("model", "optimizer", "loss", "metrics", "callbacks", "checkpoint_callback")
    }
    assert found["model"].loss is not None
    assert float(keras.ops.convert_to_numpy(found["model"].optimizer.learning_rate)) == 0.25
    assert found["optimizer"].get_config() == estimator.value("optimizer").get_config()
    assert found["loss"][1].get_config() == estimator.value("loss")[1].get_config()
    assert found["metrics"][0].num_thresholds == 7
    assert found["metrics"][1] == "mae"
    assert found["callbacks"][0].patience == 4
    assert found["checkpoint_callback"].monitor == "loss"
    again = KerasEstimator(**found)
    assert again._fingerprint() == estimator._fingerprint()


def test_variables_travel_as_plain_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from sparkvod.estimators.keras import packing

    kept = {"trainable": False}
    before = [
        keras.Variable(np.arange(12, dtype="float32").reshape(3, 4)),
        keras.Variable(np.float32(2)),
        keras.Variable(np.zeros((0, 3), "float32")),
        keras.Variable(np.array([True, False]), dtype="bool", **kept),
        keras.Variable(np.array([1.5, -3]), dtype="bfloat16"),
        keras.Variable(np.array([7, -9]), dtype="int64", **kept),
    ]
    content = packing.dump_variables(before)
    monkeypatch.setattr(packing.pickle, "loads", None)
    after = [keras.Variable(np.zeros(v.shape), dtype=v.dtype, trainable=v.trainable) for v in before]
    packing.load_variables(after, content)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(one), keras.ops.convert_to_numpy(other))
    with pytest.raises(ValueError, match="bytes"):
        packing.load_variables(after, content + b"x")
    with pytest.raises(ValueError, match="buffer"):
        packing.load_variables(after, content[:-1])
