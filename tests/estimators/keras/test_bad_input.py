"""Bad input to KerasEstimator: a clear error before anything starts."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkvod.core.compression import TopK
from sparkvod.errors import DataError
from tests.estimators.backends import Never, write

keras = pytest.importorskip("keras", reason="the Keras estimator needs keras")
pytest.importorskip(keras.backend.backend(), reason="Keras needs its backend")

from sparkvod.estimators import KerasEstimator  # noqa: E402
from sparkvod.keras.callbacks import BestModelCheckpoint  # noqa: E402

layers = keras.layers


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    numbers = np.arange(40, dtype="float32")
    columns = {
        "x": np.stack([numbers, numbers], 1),
        "y": numbers,
        "k": (numbers % 5).astype("int32"),
        "c": (numbers % 3).astype("int32"),
    }
    return write(tmp_path_factory.mktemp("store"), **columns)


def network(outputs: int = 1, width: int = 2, **last: Any) -> Any:
    return keras.Sequential([keras.Input((width,)), layers.Dense(outputs, **last)])


def compiled(**options: Any) -> Any:
    model = network()
    model.compile("sgd", "mse", **options)
    return model


def renamed() -> Any:
    """Returns a model with a function that refers to a name of this module's."""
    return keras.Sequential([keras.Input((2,)), layers.Lambda(lambda x: layers.Add()([x, x]))])


def two_inputs() -> Any:
    inputs = [keras.Input((1,), name="a"), keras.Input((1,), name="b"), keras.Input((1,), name="c")]
    return keras.Model(inputs, layers.Dense(1)(layers.Concatenate()(inputs)))


def two_outputs() -> Any:
    entry = keras.Input((2,))
    return keras.Model(entry, [layers.Dense(1, name="a")(entry), layers.Dense(1, name="b")(entry)])


class Steps(keras.Model):
    def train_step(self, data: Any) -> Any:
        return {}


class Summed(keras.Model):
    def call(self, x: Any) -> Any:
        return keras.ops.sum(x)


class OwnLoss(keras.Model):
    """Computes a loss that broadcasts the labels [rows] against the outputs [rows, 3]."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.last = layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.last(x)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **kwargs: Any) -> Any:
        return keras.ops.mean(keras.ops.square(y - y_pred))


class Unsaved(layers.Layer):
    def __init__(self, thing: Any) -> None:
        super().__init__()
        self.thing = thing

    def call(self, x: Any) -> Any:
        return x


class NotKeras:
    pass


def squares(y: Any, p: Any) -> Any:
    return keras.ops.square(y - p)


def classes(**params: Any) -> dict[str, Any]:
    return {"loss": "sparse_categorical_crossentropy", "label_cols": ["k"], **params}


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        ({"model": None}, ValueError, "no model was found"),
        ({"model": NotKeras()}, ValueError, "tests's NotKeras was found, a keras.Model of Keras 3"),
        ({"model": Summed}, ValueError, r"the class model=Summed was found.* write Summed\(\.\.\.\)"),
        ({"model": Steps()}, ValueError, r"a model with a train_step\(\) of its own \(Steps\)"),
        ({"model": Summed()}, DataError, "do not reduce over the rows"),
        ({"model": keras.Sequential([keras.Input((2,)), Unsaved(object())])}, TypeError, "cannot be saved as a .keras"),
        ({"model": renamed()}, DataError, r"that fails \(name 'layers' is not defined\): a Lambda is"),
        ({"label_cols": None}, ValueError, "no label_cols were found"),
        ({"optimizer": None}, ValueError, "no optimizer was found, and the model is not compiled"),
        ({"optimizer": NotKeras()}, ValueError, "optimizer=NotKeras of .* was found, which cannot be distributed"),
        ({"optimizer": keras.optimizers.SGD}, ValueError, "optimizer=SGD of keras.* which cannot be distributed"),
        ({"optimizer": "sgdd"}, ValueError, "optimizer='sgdd' was found, which Keras does not know"),
        ({"loss": None}, ValueError, "no loss was found"),
        ({"loss": "mze"}, ValueError, "loss='mze' was found, which Keras does not know"),
        ({"loss": ["mse", "mse"]}, ValueError, "loss with 2 members"),
        ({"loss": {"z": "mse"}}, ValueError, "loss for z was found, names of outputs"),
        ({"loss": keras.losses.MeanSquaredError}, ValueError, r"the class MeanSquaredError .* MeanSquaredError\(\)"),
        ({"loss": lambda y, p: keras.ops.mean(y - p), "sample_weight_col": "y"}, DataError, "one number per batch"),
        ({"loss": lambda y, p: y[:2]}, DataError, r"it returned the shape \[2, 1\]"),
        # labels [rows] against outputs [rows, 3]: with three rows they would broadcast
        ({"model": network(3), "loss": squares}, DataError, "the loss failed on them"),
        ({"model": network(5), "loss": squares}, DataError, "the loss failed on them"),
        (classes(model=network(3), label_cols=["c"], metrics=[squares]), DataError, "the metrics cannot be computed"),
        ({"model": OwnLoss()}, DataError, r"compute_loss\(\) of OwnLoss failed .*\[5\] and \[5, 3\]: one number"),
        ({"metrics": [keras.metrics.AUC]}, ValueError, r"the class AUC was found in metrics"),
        ({"metrics": ["nothing"]}, DataError, "the metrics cannot be computed"),
        ({"metrics": {"z": ["mae"]}}, ValueError, "metrics for z was found, names of outputs"),
        ({"model": two_outputs(), "label_cols": ["y", "k"], "metrics": {"z": "mae"}}, ValueError, "metrics for z was"),
        ({"gradient_compression": TopK(0.1)}, ValueError, r"TopK\(ratio=0.1\) was found.*TorchEstimator only"),
        ({"loss_weights": [1.0, 2.0]}, ValueError, "one number per label"),
        ({"model": compiled(loss_weights=[-1.0]), "loss": None}, ValueError, r"\[-1.0\] was found, numbers of 0 or"),
        ({"optimizer": keras.optimizers.SGD(abs), "scale_lr": True}, ValueError, "with a learning-rate schedule"),
        ({"callbacks": [NotKeras()]}, ValueError, "NotKeras was found in callbacks"),
        ({"callbacks": [keras.callbacks.BackupAndRestore("x")]}, ValueError, "with the same run_id"),
        ({"checkpoint_callback": NotKeras()}, ValueError, "a keras.callbacks.ModelCheckpoint was expected"),
        ({"checkpoint_callback": BestModelCheckpoint()}, ValueError, "without validation, which it needs"),
        ({"checkpoint_callback": BestModelCheckpoint("mae")}, DataError, "one of loss, val_loss"),
        (
            {
                "metrics": [squares],
                "label_cols": ["x"],
                "model": network(2),
                "checkpoint_callback": BestModelCheckpoint("squares"),
            },
            ValueError,
            "that metric does not say",
        ),
        ({"checkpoint_callback": BestModelCheckpoint("mae", mode="min")}, DataError, "one of loss, val_loss"),
        ({"checkpoint_callback": BestModelCheckpoint(save_freq=3)}, ValueError, "checkpoint_every"),
        # the model and the columns
        (
            {"model": network(width=3)},
            DataError,
            "the model's input .* has the shape .*, and the feature column x has 2",
        ),
        ({"model": two_inputs()}, DataError, r"a model with 3 inputs \(a, b, c\) and 1 feature columns \(x\)"),
        ({"input_shapes": [[-1, 1, 2]]}, DataError, r"the model cannot take its 1 input of \[rows, 1, 2\] float32"),
        ({"label_cols": ["y", "k"]}, DataError, r"a model with 1 outputs was found, one per label \(2: y, k\)"),
        ({"model": network(3)}, DataError, r"output for label 'y' has the shape \[rows, 3\], the label \[rows\]"),
        (classes(model=network(1)), DataError, "one output per class, two at least"),
        (classes(model=network(3)), DataError, "'k' has values 0..4, the model has 3 outputs"),
        (classes(model=network(5), label_cols=["y"]), DataError, "'y' has values 0..39, the model has 5 outputs"),
        ({"loss": "binary_crossentropy"}, DataError, "binary_crossentropy needs numbers from 0 to 1"),
        (
            {
                "optimizer": keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 9, 0.5)),
                "scale_lr": True,
            },
            ValueError,
            "with a learning-rate schedule",
        ),
    ],
)
def test_before_anything_starts(store: Any, params: dict[str, Any], error: type[Exception], words: str) -> None:
    defaults = {"model": network(), "optimizer": "sgd", "loss": "mse", "feature_cols": ["x"], "label_cols": ["y"]}
    estimator = KerasEstimator(**{**defaults, "backend": Never(), "store": store, "verbose": 0, **params})
    with pytest.raises(error, match=words):
        estimator.fit_on_parquet()


def test_weights_that_are_all_zero(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    numbers = np.arange(8, dtype="float32")
    store = write(tmp_path / "store", x=np.stack([numbers, numbers], 1), y=numbers, w=0 * numbers)
    given = {"model": network(), "optimizer": "sgd", "loss": "mse", "feature_cols": ["x"], "label_cols": ["y"]}
    with pytest.raises(AssertionError, match="training was started"):
        KerasEstimator(**given, sample_weight_col="w", backend=Never(), store=store, verbose=0).fit_on_parquet()
    assert [record.message[:37] for record in caplog.records] == ["all sample weights in column 'w' are "]


def test_metrics_by_the_names_of_labels() -> None:
    """As losses may be given; Keras takes the outputs' names alone."""
    from sparkvod.estimators.keras.building import in_model_order
    from sparkvod.estimators.keras.model_io import Feed

    feed = Feed(two_outputs(), [], ["y", "k"])
    assert in_model_order(feed, {"k": ["mae"], "a": ["mse"]}) == {"b": ["mae"], "a": ["mse"]}


def test_a_file_of_a_newer_keras() -> None:
    from sparkvod.estimators.keras import packing

    content = packing.dump_model(network())
    newer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(newer, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, json.dumps({"keras_version": "97.1.0"}) if name == "metadata.json" else data)
    with pytest.raises(DataError, match=r"Keras 97\.1\.0 saved was found, and this Python has Keras"):
        packing.load_model(newer.getvalue())


def test_another_backend(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparkvod.errors import SparkvodError
    from sparkvod.estimators.keras import inference, packing

    other = "torch" if keras.backend.backend() == "jax" else "jax"
    with pytest.raises(SparkvodError, match=f"'{other}', and this Python worker has"):
        inference.prediction(packing.dump_model(network()), [], ["y"], other)
    monkeypatch.setattr(keras.backend, "backend", lambda: "numpy")
    with pytest.raises((ImportError, ValueError), match="backend 'numpy' was found"):
        KerasEstimator(model=network(), label_cols=["y"], store=store, backend=Never()).fit_on_parquet()


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="on other backends losses may be scaled")
def test_scaled_losses_on_jax(store: Any) -> None:
    options = {"loss": "mse", "feature_cols": ["x"], "label_cols": ["y"], "backend": Never(), "store": store}
    scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError, match="a LossScaleOptimizer was found, which on JAX cannot be distributed"):
        KerasEstimator(model=network(), optimizer=scaling, **options).fit_on_parquet()
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        halves = network()
    finally:
        keras.config.set_dtype_policy(policy)
    with pytest.raises(ValueError, match="the dtype policy mixed_float16 was found, which on JAX"):
        KerasEstimator(model=halves, optimizer="sgd", **options).fit_on_parquet()


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="other backends have whole numbers of 64 bits")
def test_whole_numbers_that_jax_would_cut() -> None:
    from sparkvod.estimators.keras import with_jax

    np.testing.assert_array_equal(with_jax._narrow(np.array([-5, 2**31 - 1])), np.array([-5, 2**31 - 1], "int32"))
    with pytest.raises(DataError, match="the whole number 2147483648 was found in a column, and JAX computes with 32"):
        with_jax._narrow(np.array([0, 2**31]))


def test_a_saved_model_is_a_file_of_keras(tmp_path: Path) -> None:
    from sparkvod.estimators.keras import packing

    model = network()
    model.compile("adam", "mse")
    model.fit(np.ones((4, 2)), np.ones(4), verbose=0)
    content = packing.dump_model(model)
    assert model.optimizer is not None
    assert model.compiled
    (tmp_path / "model.keras").write_bytes(content)
    again = keras.models.load_model(tmp_path / "model.keras")
    assert getattr(again, "optimizer", None) is None  # whose state would be twice the model
    np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])
    assert packing.digest(packing.dump_model(model)) == packing.digest(content)
