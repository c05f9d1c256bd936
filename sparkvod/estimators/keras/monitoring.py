"""What Keras's callbacks watch, and what they need to be installed: checked on the driver, before anything starts."""

from __future__ import annotations

import copy
import importlib.util
import string
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from sparkvod.errors import DataError
from sparkvod.estimators.keras.best import Wanted, falls
from sparkvod.estimators.keras.loop import Loop

_WATCHERS = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau, keras.callbacks.ModelCheckpoint)
#: Callbacks by name, with what they import when they are first called.
_PACKAGES = {"TensorBoard": ("tensorboard", "tensorflow"), "RemoteMonitor": ("requests",)}
#: Those that add the learning rate to what the callbacks after them are given.
_RATES = (keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler)


def check_packages(callbacks: Sequence[Any]) -> None:
    """Refuses callbacks whose packages are not installed.

    Args:
        callbacks: the Param ``callbacks``.

    Raises:
        ImportError: one is missing.
    """
    for callback in callbacks:
        for name, packages in _PACKAGES.items():
            if not _is_kerass(callback, getattr(keras.callbacks, name)):
                continue
            missing = [package for package in packages if importlib.util.find_spec(package) is None]
            if missing:
                raise ImportError(
                    f"{type(callback).__name__} was found in callbacks, which needs the package "
                    f"{' and '.join(missing)}, and this Python does not have it; `pip install {' '.join(missing)}` "
                    "here and on the executors, or leave the callback out"
                )


def check_validation(callbacks: Sequence[Any], best: Wanted | None, has_validation: bool) -> None:
    """Refuses to watch the validation where there is none.

    Args:
        callbacks: the Param ``callbacks``.
        best: what the Param ``checkpoint_callback`` asks for.
        has_validation: whether there is.

    Raises:
        ValueError: there is none.
    """
    if has_validation:
        return
    if best is not None and best.monitor.startswith("val_"):
        raise ValueError(
            f"checkpoint_callback with monitor={best.monitor!r} was found without validation, which it needs; pass "
            "validation=0.1, or the name of a column, or monitor 'loss'"
        )
    for callback, names in _watched(callbacks):
        found = next((name for name in names if name.startswith("val_")), None)
        if found is not None:
            raise ValueError(
                f"{type(callback).__name__} of {found!r} was found in callbacks without validation, which it "
                f"needs; pass validation=0.1, or the name of a column, or watch {found.removeprefix('val_')!r}"
            )


def check_names(callbacks: Sequence[Any], best: Wanted | None, loop: Loop) -> None:
    """Refuses to watch what no epoch's figures have.

    Args:
        callbacks: the Param ``callbacks``.
        best: what the Param ``checkpoint_callback`` asks for.
        loop: the model with its metrics, built.

    Raises:
        DataError: something else is watched.
        ValueError: it is not known whether more of it is better.
    """
    names = list(loop.record(np.zeros(loop.sums_size)))
    names += [f"val_{name}" for name in names]
    known = [*names, *["learning_rate"] * any(isinstance(callback, _RATES) for callback in callbacks)]
    for callback, wanted in _watched(callbacks):
        strangers = [name for name in wanted if name not in known]
        if strangers:
            raise DataError(
                f"{type(callback).__name__} of {strangers[0]!r} was found in callbacks, one of {', '.join(known)} "
                "was expected; change its monitor (a ModelCheckpoint's filepath), or metrics"
            )
        decide = getattr(copied := copy.copy(callback), "_set_monitor_op", None)
        if decide is None:
            continue
        copied.set_model(loop.model)
        try:
            decide()
        except ValueError as error:
            raise ValueError(
                f"{type(callback).__name__} of {callback.monitor!r} with mode='auto' was found in callbacks, for "
                f"which Keras does not know whether more is better ({error}); pass mode='max' or mode='min'"
            ) from error
    if best is None:
        return
    if best.monitor not in names:
        raise DataError(
            f"checkpoint_callback with monitor={best.monitor!r} was found, one of {', '.join(names)} was expected"
        )
    falls(best, loop.model.metrics)


def _watched(callbacks: Sequence[Any]) -> list[tuple[Any, list[str]]]:
    """Returns Keras's own watchers with the names of the figures that they need.

    Not those after a callback that may add figures: one of the user's own that is called at an epoch's end.
    """
    found = []
    for callback in callbacks:
        if any(_is_kerass(callback, watcher) for watcher in _WATCHERS):
            found.append((callback, _names(callback)))
        elif not str(getattr(callback.on_epoch_end, "__module__", "")).startswith("keras."):  # LambdaCallback's own too
            break
    return found


def _names(callback: Any) -> list[str]:
    is_checkpoint = isinstance(callback, keras.callbacks.ModelCheckpoint)
    names = [callback.monitor] if not is_checkpoint or callback.save_best_only else []
    if is_checkpoint:
        fields = [field for _, field, _, _ in string.Formatter().parse(str(callback.filepath)) if field]
        names += [field for field in fields if field not in ("epoch", "batch")]
    return names


def _is_kerass(callback: Any, cls: type) -> bool:
    """Returns whether a callback does at an epoch's end what that class of Keras's does."""
    hooks = ("on_epoch_end", "get_monitor_value")
    return isinstance(callback, cls) and all(
        getattr(type(callback), hook, None) is getattr(cls, hook, None) for hook in hooks
    )
