"""What is of the user's own and would not do here what it does in Keras's fit: refused on the driver, by name."""

from __future__ import annotations

from typing import Any

import pytest

keras = pytest.importorskip("keras", reason="the Keras estimator needs keras")
pytest.importorskip(keras.backend.backend(), reason="Keras needs its backend")

from sparkvod.data import Column  # noqa: E402
from sparkvod.errors import DataError  # noqa: E402
from sparkvod.estimators import KerasEstimator  # noqa: E402
from sparkvod.estimators.keras import checking  # noqa: E402
from sparkvod.estimators.trying import ROWS  # noqa: E402

layers = keras.layers
BACKEND = keras.backend.backend()


def network(outputs: int = 1, cls: Any = keras.Model) -> Any:
    entry = keras.Input((2,))
    return cls(entry, layers.Dense(outputs)(entry))


def refused(**params: Any) -> None:
    """Checks what the estimator checks before it looks at any data."""
    defaults = {"model": network(), "optimizer": "sgd", "loss": "mse", "label_cols": ["y"]}
    KerasEstimator(**{**defaults, **params})._check_given()


class Predicts(keras.Model):
    def predict_step(self, data: Any) -> Any:
        return data


class Functions(keras.Model):
    def make_test_function(self, force: bool = False) -> Any:
        return None


@pytest.mark.parametrize(("cls", "method"), [(Predicts, "predict_step"), (Functions, "make_test_function")])
def test_a_step_of_the_models_own(cls: Any, method: str) -> None:
    with pytest.raises(ValueError, match=rf"a model with a {method}\(\) of its own \({cls.__name__}\) was found"):
        refused(model=network(cls=cls))


class Around(keras.optimizers.SGD):
    """Overrides what Keras's fit calls on TensorFlow and on JAX."""

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        return super().apply_gradients(grads_and_vars)

    def stateless_apply(self, *args: Any) -> Any:
        return super().stateless_apply(*args)


class Within(keras.optimizers.SGD):
    def apply(self, *args: Any) -> Any:
        return super().apply(*args)


def test_an_optimizer_whose_step_goes_around_apply() -> None:
    refused(optimizer=Within(0.1))
    method = {"tensorflow": "apply_gradients", "jax": "stateless_apply"}.get(BACKEND)
    if method is None:  # on PyTorch Keras's own fit calls apply()
        refused(optimizer=Around(0.1))
        return
    with pytest.raises(ValueError, match=rf"{method}\(\) of its own \(Around\) .*override apply\(\)"):
        refused(optimizer=Around(0.1))


@pytest.mark.parametrize("loss", ["categorical_crossentropy", "CategoricalFocalCrossentropy", "cosine_similarity"])
def test_a_loss_among_outputs_of_which_there_is_one(loss: str) -> None:
    def planned(outputs: int) -> Any:
        column = Column("y", "vector", "float32", (outputs,), "")
        zeros, made = keras.ops.zeros((ROWS, outputs)), getattr(keras.losses, loss) if loss[0] == "C" else loss
        return checking.plan_labels([zeros], [column], [made() if callable(made) else made], [None], False, False)

    assert len(planned(2)[0]) == 1
    with pytest.raises(DataError, match=r"the shape \[rows, 1\].* two outputs at least were expected"):
        planned(1)
