"""Models that are not built, whose ``.keras`` file does not hold what their layers have learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.estimators.backends import Here, write

keras = pytest.importorskip("keras", reason="the Keras estimator needs keras")
pytest.importorskip(keras.backend.backend(), reason="Keras needs its backend")

from sparkvod.estimators import KerasEstimator  # noqa: E402
from sparkvod.estimators.keras import forgetting, packing  # noqa: E402

layers = keras.layers
X = (np.random.default_rng(2).random((60, 2)) * 100 + 50).astype("float32")


@keras.saving.register_keras_serializable("tests")
class Net(keras.Model):
    """Is built when it is called."""

    def __init__(self, kind: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kind = kind
        self.first = {
            "Normalization": layers.Normalization,
            "Discretization": lambda: layers.Discretization(num_bins=4),
            "Dense": lambda: layers.Dense(2),
            "within": lambda: keras.Sequential([layers.Normalization(), layers.Dense(2)]),
            "functional": lambda: keras.Sequential([keras.Input((2,)), layers.Dense(2)]),
            "IntegerLookup": layers.IntegerLookup,
        }[kind]()
        self.last = layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.last(self.first(x))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "kind": self.kind}


def learned(kind: str) -> Any:
    model = Net(kind)
    if kind == "Dense":
        model.first.build((None, 2))
    elif kind == "IntegerLookup":
        model.first.adapt(np.array([3, 4, 4]))
    elif kind != "functional":
        (model.first.layers[0] if kind == "within" else model.first).adapt(X)
    return model


def copied(model: Any) -> Any:
    return packing.load_model(packing.dump_model(model))


@pytest.mark.parametrize("kind", ["Normalization", "Dense", "within", "Discretization", "functional", "IntegerLookup"])
def test_what_a_copy_has_not(kind: str) -> None:
    model = learned(kind)
    lost = forgetting.forgotten(model, copied(model)) if forgetting.may_forget(model) else []
    if kind in ("functional", "IntegerLookup"):
        assert lost == []
        return
    (layer,) = lost
    with pytest.raises(ValueError, match=rf"what the layers {layer.name} of a Net have learned is not in the \.keras"):
        forgetting.refuse(model, lost)
    if kind != "Discretization":  # which no subclassed model keeps
        model(X[:1])
        assert forgetting.forgotten(model, copied(model)) == []


def test_fit_builds_the_model_first(tmp_path: Path) -> None:
    model = learned("Normalization")
    store = write(tmp_path / "store", x=X, y=X.sum(1))
    options: dict[str, Any] = {"feature_cols": ["x"], "label_cols": ["y"], "random_seed": 0, "verbose": 0}
    estimator = KerasEstimator(
        **{"model": model, "optimizer": keras.optimizers.SGD(0.0), "loss": "mse", "batch_size": 60, "epochs": 1},
        **{"store": store, "backend": Here(), **options},
    )
    with pytest.raises(ValueError, match=r"call the model once on a few rows, model\(rows\), before this"):
        estimator._dump("model", model)
    found = estimator.fit_on_parquet()
    trained = found.getModel()
    mean = keras.ops.convert_to_numpy(trained.first.mean).ravel()
    np.testing.assert_allclose(mean, X.mean(0), rtol=1e-4)
    expected = keras.ops.convert_to_numpy(model(X))  # nothing was learned, at a learning rate of 0
    np.testing.assert_allclose(keras.ops.convert_to_numpy(trained(X)), expected, rtol=1e-5, atol=1e-5)
    loss = np.mean((expected[:, 0] - X.sum(1)) ** 2)
    assert found.getHistory()[0]["train"]["loss"] == pytest.approx(loss, rel=1e-4)
    assert estimator._dump("model", model)


@pytest.mark.filterwarnings("ignore:.*cannot be built automatically")
def test_bins_are_refused(tmp_path: Path) -> None:
    model = learned("Discretization")
    model(X[:1])
    estimator = KerasEstimator(
        **{"model": model, "optimizer": "sgd", "loss": "mse", "feature_cols": ["x"], "label_cols": ["y"]},
        **{"store": write(tmp_path / "store", x=X, y=X.sum(1)), "backend": Here(), "verbose": 0},
    )
    with pytest.raises(ValueError, match=r"make the layer as Discretization\(bin_boundaries=\.\.\.\)"):
        estimator.fit_on_parquet()


@keras.saving.register_keras_serializable("tests")
class Several(keras.Model):
    """Is called with several inputs, by name or not."""

    def __init__(self, by_name: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.by_name, self.first = by_name, layers.Dense(1)

    def call(self, x: Any) -> Any:
        a, b = (x["a"], x["b"]) if self.by_name else x
        return self.first(a + b)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "by_name": self.by_name}


@pytest.mark.parametrize("by_name", [False, True])
def test_a_model_of_several_inputs(by_name: bool) -> None:
    model = Several(by_name)
    model({"a": X[:2], "b": X[:2]} if by_name else [X[:2], X[:2]])
    assert forgetting.may_forget(model)
    assert forgetting.forgotten(model, copied(model)) == []


@keras.saving.register_keras_serializable("tests")
class Eager(Net):
    """Is not built by Keras alone."""

    closed = False

    def call(self, x: Any) -> Any:
        if self.closed:
            raise ValueError("data alone build this")
        return super().call(x)


@pytest.mark.filterwarnings("ignore:.*cannot be built automatically")
def test_a_built_model_whose_copy_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Eager("Dense")
    model(X[:1])
    monkeypatch.setattr(Eager, "closed", True)
    lost = forgetting.forgotten(model, copied(model))
    assert lost == [model.first, model.last]
    with pytest.raises(ValueError, match=r"give the model a build_from_config\(\)"):
        forgetting.refuse(model, lost)
