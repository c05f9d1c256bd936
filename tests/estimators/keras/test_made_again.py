"""What of the user's own travels: found by itself where it is in use, and tried on the driver."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.estimators.backends import Here, write

keras = pytest.importorskip("keras", reason="the Keras estimator needs keras")
pytest.importorskip(keras.backend.backend(), reason="Keras needs its backend")

from sparkvod.estimators import Callback, KerasEstimator  # noqa: E402
from sparkvod.estimators.keras import building, packing  # noqa: E402

optimizers = keras.optimizers


def network() -> Any:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def half() -> float:
    return 0.5


def script_schedule() -> Any:
    """Returns a schedule whose class is in no module, as that of a script's or a notebook's is for a rank."""

    class Script(optimizers.schedules.LearningRateSchedule):
        def __init__(self, rate: float = 0.25) -> None:
            self.rate = rate

        def __call__(self, step: Any) -> Any:
            return self.rate

        def get_config(self) -> dict[str, Any]:
            return {"rate": self.rate}

    Script.__module__ = "__main__"
    return Script()


class Bare(optimizers.schedules.LearningRateSchedule):
    def __call__(self, step: Any) -> Any:
        return 0.1


class Unnamed(keras.losses.Loss):
    def __init__(self, k: int) -> None:
        super().__init__()

    def call(self, y: Any, p: Any) -> Any:
        return y - p


class Broken(keras.metrics.Mean):
    def get_config(self) -> dict[str, Any]:
        return {"k": self.nothing}


class Counting(keras.metrics.Mean):
    def __init__(self, k: int) -> None:
        super().__init__()


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(("rate", "value"), [(half, 0.5), (script_schedule(), 0.25), (0.125, 0.125)])
def test_learning_rates_travel(rate: Any, value: float, wrapped: bool) -> None:
    optimizer = optimizers.SGD(rate)
    if wrapped:
        optimizer = optimizers.LossScaleOptimizer(optimizer)
    made = building.Parts(building.pack({"optimizer": optimizer}, network(), {})).optimizer()
    made = getattr(made, "inner_optimizer", made)
    made.build([])
    assert float(keras.ops.convert_to_numpy(made.learning_rate)) == value


def test_learning_rates_are_saved_with_an_estimator() -> None:
    estimator = KerasEstimator()
    again = estimator._load("optimizer", estimator._dump("optimizer", optimizers.SGD(script_schedule())))
    again.build([])
    assert float(keras.ops.convert_to_numpy(again.learning_rate)) == 0.25


@pytest.mark.filterwarnings("ignore:The object being serialized includes a `lambda`")
@pytest.mark.parametrize(
    ("name", "part", "words"),
    [
        (
            "optimizer",
            optimizers.SGD(lambda: 0.1),
            r"optimizer=SGD was found.* write a lambda as a function with a name",
        ),
        (
            "optimizer",
            optimizers.SGD(Bare()),
            r"optimizer=SGD .*'Bare' must override `get_config\(\)`.* as each rank does",
        ),
        ("metrics", [Broken()], r"metrics=\[.*Broken.*AttributeError: .*'nothing'\), as each rank does"),
        ("loss", Unnamed(3), r"loss=Unnamed was found, which cannot be made again from its get_config\(\)"),
        ("metrics", [[Counting(3)]], "metrics=.*Counting.* cannot be made again"),
    ],
)
def test_what_a_rank_could_not_make(name: str, part: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        building.pack({name: part}, network(), {})


def test_classes_of_a_script() -> None:
    """Keras names no module for them; they go along because the model has them."""

    class Double(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return 2 * x

    class Net(keras.Model):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.double = Double()

        def call(self, x: Any) -> Any:
            return self.double(x)

    Double.__module__ = Net.__module__ = "__main__"
    inner = building.Parts(building.pack({}, keras.Sequential([keras.Input((2,)), Double()]), {})).model()
    assert type(inner.layers[-1]).__name__ == "Double"
    assert type(building.Parts(building.pack({}, Net(), {})).model()).__name__ == "Net"


class Inner(keras.Model):
    """Makes a layer in its constructor, which no configuration knows."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.last = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.last(x)


@pytest.fixture
def halves() -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(before)


def test_a_dtype_policy_travels(halves: None) -> None:
    content = [packing.dump_model(model) for model in (network(), Inner())]
    keras.config.set_dtype_policy("float32")  # as it is where the model is made again
    plain, inner = map(packing.load_model, content)
    assert plain.dtype_policy.name == "mixed_float16"
    assert inner.last.dtype_policy.name == "mixed_float16"
    assert keras.config.dtype_policy().name == "float32"


class Looks(Callback):
    """Notes the optimizer that a rank has."""

    seen: list[Any] = []

    def on_train_begin(self, trainer: Any) -> None:
        self.seen.append(hasattr(trainer.optimizer, "inner_optimizer"))


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="no losses are scaled on JAX: it is refused")
@pytest.mark.parametrize(("options", "scaled"), [({}, True), ({"auto_scale_loss": False}, False)])
def test_losses_are_scaled_as_keras_does(halves: None, tmp_path: Path, options: Any, scaled: bool) -> None:
    model = network()
    model.compile("sgd", "mse", **options)
    numbers = np.linspace(0, 1, 8, dtype="float32")
    store = write(tmp_path / "store", x=np.stack([numbers, numbers], 1), y=numbers)
    Looks.seen.clear()
    given = {"optimizer": "sgd", "loss": "mse"}
    fixed = {"store": store, "backend": Here(), "verbose": 0, "feature_cols": ["x"], "label_cols": ["y"]}
    for params in ({"model": model}, {"model": network(), **given}):
        KerasEstimator(**params, **fixed, callbacks=[Looks()]).fit_on_parquet()
    assert Looks.seen == [scaled, True]


class Owned(optimizers.SGD):
    """Steps by a factor that its configuration does not have."""

    factor = 1.0

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient * self.factor, variable, learning_rate)


def one_step(store: Any, model: Any, optimizer: Any, **params: Any) -> list[np.ndarray]:
    given = {"feature_cols": ["x"], "label_cols": ["y"], "loss": "mse", "batch_size": 4, "epochs": 1, **params}
    estimator = KerasEstimator(model=model, optimizer=optimizer, store=store, backend=Here(), verbose=0, **given)
    return estimator.fit_on_parquet().getModel().get_weights()


def small(tmp_path: Path) -> Any:
    return write(tmp_path / "store", x=np.ones((4, 2), "float32"), y=np.ones(4, "float32"))


@pytest.mark.parametrize("wrapped", [False, True])
def test_attributes_of_an_instance_travel(tmp_path: Path, wrapped: bool) -> None:
    if wrapped and keras.backend.backend() == "jax":
        pytest.skip("a LossScaleOptimizer is refused there")
    keras.utils.set_random_seed(0)
    store, model = small(tmp_path), network()
    plain, owned = Owned(0.1), Owned(0.1)
    owned.factor = 3.0
    expected = one_step(store, model, optimizers.SGD(0.3))
    found = one_step(store, model, optimizers.LossScaleOptimizer(owned, initial_scale=2.0) if wrapped else owned)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    estimator = KerasEstimator()
    assert estimator._load("optimizer", estimator._dump("optimizer", owned)).factor == 3.0
    assert packing.taken_apart(plain).attributes == ()
    for value in (
        keras.losses.Huber(),
        keras.metrics.AUC(num_thresholds=3),
        keras.metrics.Precision([0.2, 0.5]),
        optimizers.Adam(script_schedule()),
    ):
        assert packing.taken_apart(value).attributes == ()
    plain.handle = (tmp_path / "open").open("w")
    with plain.handle, pytest.raises(ValueError, match="attribute 'handle' of Owned cannot be sent to the ranks"):
        building.pack({"optimizer": plain}, network(), {})


def test_a_weight_that_is_not_trained_stays(tmp_path: Path) -> None:
    """The configuration has this of layers, but not of single weights."""
    model = network()
    model.layers[0].kernel.trainable = False
    kernel, bias = one_step(small(tmp_path), model, optimizers.SGD(0.5))
    np.testing.assert_array_equal(kernel, model.get_weights()[0])
    assert (bias != model.get_weights()[1]).all()


def test_weights_without_decay_stay_so(tmp_path: Path) -> None:
    store = small(tmp_path)
    for by_name in (False, True):
        model = network()
        model.set_weights([np.full((2, 1), 0.25), np.full(1, 0.5)])  # which predict the label: only the decay acts
        optimizer = optimizers.SGD(0.5, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(
            **({"var_names": ["bias"]} if by_name else {"var_list": [model.weights[1]]})
        )
        kernel, bias = one_step(store, model, optimizer)
        np.testing.assert_allclose(kernel, np.full((2, 1), 0.25 * 0.75))
        np.testing.assert_allclose(bias, [0.5])


def test_scaled_losses_make_the_same_step(tmp_path: Path) -> None:
    store, model = small(tmp_path), network()
    expected = one_step(store, model, optimizers.SGD(0.25))
    for mine, theirs in zip(
        one_step(store, model, optimizers.SGD(0.25, loss_scale_factor=64.0)), expected, strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def test_iterations_of_an_optimizer_that_was_not_built(tmp_path: Path) -> None:
    decay = optimizers.schedules.PiecewiseConstantDecay([10], [0.0, 0.25])
    later, store, model = optimizers.SGD(decay), small(tmp_path), network()
    later.iterations.assign(11)
    expected = one_step(store, model, optimizers.SGD(0.25))
    for mine, theirs in zip(one_step(store, model, later), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def test_synchronized_batch_normalization_is_refused() -> None:
    if keras.backend.backend() != "tensorflow":
        pytest.skip("Keras has it on TensorFlow alone")
    layer = keras.layers.BatchNormalization(synchronized=True, name="joint")
    inner = keras.Sequential([keras.Input((2,)), layer])
    for model in (
        keras.Sequential([keras.Input((2,)), inner]),
        keras.Sequential([keras.layers.TimeDistributed(layer)]),
    ):
        estimator = KerasEstimator(model=model, optimizer="sgd", loss="mse", label_cols=["y"], feature_cols=["x"])
        with pytest.raises(ValueError, match="BatchNormalization 'joint' has synchronized=True"):
            estimator._check_given()


def test_a_function_builds_the_model(tmp_path: Path) -> None:
    """It is called on the driver, once for each fit, and saved as a function."""
    store, calls = small(tmp_path), []

    def build() -> Any:
        calls.append(1)
        keras.utils.set_random_seed(len(calls))
        model = network()
        model.compile("sgd", "mse")
        return model

    first, second = (one_step(store, build, None) for _ in range(2))
    assert len(calls) == 2
    keras.utils.set_random_seed(1)
    for mine, theirs in zip(first, one_step(store, network(), "sgd"), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    assert (first[0] != second[0]).any()
    estimator = KerasEstimator()
    assert isinstance(estimator._load("model", estimator._dump("model", network)), type(network))
    for builder, words in (
        (lambda: 1 / 0, r"model=.*lambda.* raised ZeroDivisionError: division by zero. It must build a keras.Model"),
        (lambda units: network(), r"raised TypeError: .*units.* without arguments"),
        (half, r"model=half must return a keras.Model, got a float"),
    ):
        with pytest.raises(ValueError, match=words):
            one_step(store, builder, "sgd")


def test_a_loss_that_is_not_finite(tmp_path: Path, caplog: Any) -> None:
    """The square of a label of the second step is infinite in float32."""
    y = np.array([1.0] * 4 + [1e30] * 4 + [1.0] * 4, "float32")
    store = write(tmp_path / "store", x=np.ones((12, 2), "float32"), y=y)
    logging.getLogger("sparkvod").propagate = True
    with caplog.at_level(logging.WARNING, "sparkvod"):
        one_step(store, network(), "sgd", shuffle=False, epochs=2)
    said = [record.getMessage() for record in caplog.records if "NaN or infinite" in record.getMessage()]
    assert len(said) == 1
    assert "the training loss became NaN or infinite in epoch 0, step 1: lower the learning rate" in said[0]
    with pytest.raises(FloatingPointError, match="in epoch 0, step 1, and terminate_on_nan=True ends the run"):
        one_step(store, network(), "sgd", shuffle=False, terminate_on_nan=True)


def test_a_global_batch_is_that_of_all_ranks(tmp_path: Path) -> None:
    store, model = small(tmp_path), network()
    expected = one_step(store, model, optimizers.SGD(0.5))
    found = one_step(store, model, optimizers.SGD(0.5), batch_size=None, global_batch_size=4)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
