"""What the user gave a ``KerasEstimator``: model, optimizer, loss, metrics. On the driver only."""

from __future__ import annotations

import functools
import math
from typing import Any

import keras

from sparkvod import log
from sparkvod.core.compression import check_compressor
from sparkvod.estimators.callbacks import Callback
from sparkvod.estimators.checks import refuse_classes
from sparkvod.estimators.keras import building, checking, packing
from sparkvod.estimators.keras.best import Wanted
from sparkvod.estimators.keras.callbacks import KerasCallbacks
from sparkvod.estimators.keras.model_io import Feed
from sparkvod.estimators.parts import dump_part
from sparkvod.keras import backends
from sparkvod.keras.synchronized import refuse_synchronized

_LOG = log.get("estimators")

#: Methods of a model that are the estimator's, or the ranks' and transform's.
_STEPS = (
    *("train_step", "test_step", "predict_step"),
    *("make_train_function", "make_test_function", "make_predict_function"),
)
#: Methods of an optimizer that Keras's own fit calls, around apply() or instead of it.
_STEPPERS = {"tensorflow": "apply_gradients", "jax": "stateless_apply"}


def check(estimator: Any, model: Any, given: dict[str, Any]) -> None:
    """Checks what can be checked without data.

    Args:
        estimator: the estimator.
        model: its model.
        given: optimizer, loss, metrics and so on.

    Raises:
        ValueError: something is missing, is none of Keras 3, or cannot be trained here.
        ImportError: Keras's backend is not supported.
    """
    backends.current()
    callbacks(estimator.value("callbacks"))
    _check_model(model)
    refuse_synchronized(model)
    _check_optimizer(given["optimizer"], estimator.value("scale_lr"))
    _check_scaling(model, given["optimizer"])
    if given["loss"] is None and not building.has_own_loss(model):
        raise ValueError(
            "no loss was found, and the model is not compiled with one; one was expected, such as loss='mse', a "
            "keras.losses.Loss, or a list with one per label"
        )
    refuse_classes("loss", given["loss"], keras.losses.Loss)
    refuse_classes("metrics", given["metrics"], keras.metrics.Metric)
    labels, weights = estimator.value("label_cols"), given["loss_weights"]
    if isinstance(weights, (list, tuple)) and len(weights) != len(labels):
        raise ValueError(f"loss_weights={weights} was found, one number per label ({len(labels)}) was expected")
    compiled = weights.values() if isinstance(weights, dict) else weights if isinstance(weights, (list, tuple)) else []
    if any(weight is not None and weight < 0 for weight in compiled):
        raise ValueError(f"loss_weights={weights} was found, numbers of 0 or more were expected")
    best(estimator.value("checkpoint_callback"))
    if (compression := estimator.value("gradient_compression")) is not None:
        check_compressor(compression)


def _check_model(model: Any) -> None:
    if isinstance(model, type):
        raise ValueError(
            f"the class model={model.__name__} was found, a model was expected; write {model.__name__}(...)"
        )
    if not isinstance(model, keras.Model):
        name = f"{type(model).__module__.partition('.')[0]}'s {type(model).__name__}"
        raise ValueError(
            f"model={name} was found, a keras.Model of Keras {keras.__version__} was expected; models of tf_keras or "
            "older versions are saved there as .keras and loaded by keras.models.load_model"
        )
    for method in _STEPS:
        if _overrides(type(model), method):
            raise ValueError(
                f"a model with a {method}() of its own ({type(model).__name__}) was found, Keras's own was expected, "
                "since the step is the estimator's; override compute_loss(), call(), or pass a loss"
            )


def _overrides(cls: type, method: str) -> bool:
    """Returns whether a method of a class is none of Keras's own."""
    owner = next((base for base in cls.__mro__ if method in vars(base)), None)
    return owner is not None and owner.__module__.partition(".")[0] != "keras"


def _check_optimizer(given: Any, scale_lr: bool) -> None:
    if given is None:
        raise ValueError(
            "no optimizer was found, and the model is not compiled with one; one was expected, such as "
            "optimizer=keras.optimizers.Adam(0.001)"
        )
    made = given
    if isinstance(given, (str, dict)):
        try:
            made = keras.optimizers.get(given)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"optimizer={given!r} was found, which Keras does not know ({error}); pass a name such as 'adam', or a "
                "keras.optimizers.Optimizer"
            ) from error
    if not isinstance(made, keras.optimizers.Optimizer):
        name = made.__name__ if isinstance(made, type) else type(made).__name__
        raise ValueError(
            f"optimizer={name} of {getattr(made, '__module__', type(made).__module__)} was found, which cannot be "
            f"distributed; an optimizer of Keras {keras.__version__} was expected, such as keras.optimizers.Adam(0.001)"
        )
    method = _STEPPERS.get(keras.backend.backend())
    if method is not None and _overrides(type(made), method):
        raise ValueError(
            f"an optimizer with {method}() of its own ({type(made).__name__}) was found, which cannot be distributed, "
            "Keras's own was expected, since gradients are summed over the ranks in apply(); override apply() or "
            "update_step(), which are given the gradients of all ranks"
        )
    if hasattr(made, "_sparkvod"):
        raise ValueError(
            "an optimizer that is already distributed was found, a plain one was expected; the estimator wraps it"
        )
    rate = getattr(made, "_learning_rate", None)
    if scale_lr and (callable(rate) or isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)):
        raise ValueError(
            "scale_lr=True was found with a learning-rate schedule, a number was expected; scale the schedule itself"
        )


def _check_scaling(model: Any, given: Any) -> None:
    found = "the dtype policy mixed_float16" if model.dtype_policy.name == "mixed_float16" else None
    if isinstance(given, keras.optimizers.LossScaleOptimizer):
        found = "a LossScaleOptimizer"
    if found is not None and keras.backend.backend() == "jax":
        raise ValueError(
            f"{found} was found, which on JAX cannot be distributed, none was expected: the loss would be scaled past "
            "the distributed optimizer; use the dtype policy mixed_bfloat16, which needs no scaling"
        )


def optimizer(given: Any, model: Any) -> dict[str, Any]:
    """Return the parts of the payload that are the optimizer's, by name.

    They are the optimizer; its state if it has taken steps, and whether that has the variables that it is built with;
    and the places in the model's weights of those that ``exclude_from_weight_decay`` names by variable.
    """
    made = keras.optimizers.get(given) if isinstance(given, (str, dict)) else given
    state = packing.dump_variables(made.variables) if int(made.iterations) else None
    inner = getattr(made, "inner_optimizer", made)
    excluded = getattr(inner, "_exclude_from_weight_decay", ())
    undecayed = [place for place, weight in enumerate(model.weights) if inner._var_key(weight) in excluded]
    return {"optimizer": made, "optimizer_state": state, "optimizer_built": made.built, "undecayed": undecayed}


def best(callback: Any) -> Wanted | None:
    """Returns what a ``checkpoint_callback`` asks for, None where the last weights are returned.

    Raises:
        ValueError: it is none, or asks for what cannot be.
    """
    if callback is None:
        return None
    if not isinstance(callback, keras.callbacks.ModelCheckpoint):
        raise ValueError(
            f"checkpoint_callback={type(callback).__name__} was found, a keras.callbacks.ModelCheckpoint was expected, "
            "such as sparkvod.keras.callbacks.BestModelCheckpoint(monitor='val_loss')"
        )
    if callback.save_freq != "epoch":
        raise ValueError(
            f"checkpoint_callback with save_freq={callback.save_freq} was found, 'epoch' was expected; steps between "
            "checkpoints are checkpoint_every"
        )
    if not callback.save_best_only:
        return None
    threshold = callback.best if callback.best is not None and math.isfinite(callback.best) else None
    return Wanted(callback.monitor, callback.mode, threshold)


def callbacks(found: list[Any], store: Any = None, run_id: str = "") -> list[Any]:
    """Returns callbacks as the training loop calls them: Keras's as one, where the first of them was.

    Args:
        found: the Param ``callbacks``.
        store: where the run's files go.
        run_id: its name.

    Raises:
        ValueError: one of them is none, or has no meaning here.
        TypeError: one of them cannot be pickled.
    """
    others: list[Any] = []
    own = [callback for callback in found if isinstance(callback, keras.callbacks.Callback)]
    for callback in found:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                "callbacks with a BackupAndRestore was found, none was expected: each run writes its own checkpoint, "
                "and goes on from it when it is started again with the same run_id"
            )
        if isinstance(callback, keras.callbacks.Callback):
            if callback is own[0]:
                others.append(KerasCallbacks(dump_part("callbacks", own), store, run_id))
        elif isinstance(callback, Callback):
            others.append(callback)
        else:
            name = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            raise ValueError(
                f"{name} was found in callbacks, objects of keras.callbacks.Callback or sparkvod.estimators.Callback "
                "were expected"
            )
    return others


def build(feed: Feed) -> None:
    """Gives a model that was not built its variables."""
    if not feed.model.built:
        checking.forward(feed)


def fingerprint(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Returns, as JSON values, what a run depends on."""
    found: dict[str, Any] = {
        f"model.{number}": f"{keras.backend.standardize_dtype(weight.dtype)} {list(weight.shape)}"
        for number, weight in enumerate(model.weights if model.built else [])
    }
    found |= {"model": type(model).__qualname__, "keras": keras.backend.backend()}
    made = keras.optimizers.get(given["optimizer"])
    found["optimizer"] = type(made).__name__
    found |= {f"optimizer.{name}": named(value) for name, value in made.get_config().items() if name != "name"}
    found |= {name: named(given[name]) for name in ("loss", "loss_weights", "metrics", "weighted_metrics")}
    return found


def named(value: Any) -> Any:
    """Returns something that is the same in another process, for what may be an object or a function."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [named(item) for item in value]
    if isinstance(value, dict):
        return {str(name): named(item) for name, item in value.items()}
    if hasattr(value, "get_config") and not isinstance(value, type):
        config = {name: named(item) for name, item in value.get_config().items() if name != "name"}
        return {type(value).__qualname__: config}
    if isinstance(value, functools.partial):
        return {str(named(value.func)): [named(list(value.args)), named(value.keywords)]}
    name = getattr(value, "__qualname__", None)
    return str(name) if name else repr(value).split(" at 0x")[0]
