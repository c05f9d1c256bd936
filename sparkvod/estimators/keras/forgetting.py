"""What a model has learned and its ``.keras`` file does not hold: on the driver.

Keras saves the variables of every layer, but makes a subclassed model again from its constructor alone. Where the model
was not built, or Keras cannot build the copy, the copy's layers have no variables yet, and what ``adapt()`` or
earlier training put into the model's is passed over.
"""

from __future__ import annotations

from typing import Any

import keras
from keras.src.models.functional import Functional


def may_forget(model: Any) -> bool:
    """Returns whether a copy of a model has to be looked at."""
    layers = _layers(model)
    # Of a functional model the file has how its layers are called, so that the copy is built as it was.
    is_whole = model.built and isinstance(model, (Functional, keras.Sequential))
    return any(_bins(layer) is not None or (not is_whole and _variables(layer)) for layer in layers)


def forgotten(model: Any, copy: Any) -> list[Any]:
    """Returns the layers that have learned something which those of a copy have not.

    Args:
        model: the model.
        copy: what was made of its ``.keras`` file.
    """
    return [
        layer
        for layer, other in zip(_layers(model), _layers(copy), strict=False)
        if type(layer) is type(other)
        and (len(_variables(layer)) > len(_variables(other)) or (_bins(layer) is not None and not _has_bins(other)))
    ]


def refuse(model: Any, lost: list[Any]) -> None:
    """Refuses a model that a ``.keras`` file does not hold.

    Args:
        model: the model.
        lost: what :func:`forgotten` returned.

    Raises:
        ValueError: there is such a layer.
    """
    if not lost:
        return
    names = ", ".join(layer.name for layer in lost)
    remedy = "call the model once on a few rows, model(rows), before this"
    if model.built:
        remedy = "give the model a build_from_config() that builds its layers, and get_build_config()"
    if any(_bins(layer) is not None for layer in lost):
        remedy = "make the layer as Discretization(bin_boundaries=...), with those that adapt() found"
    raise ValueError(
        f"what the layers {names} of a {type(model).__name__} have learned is not in the .keras file by which models "
        f"are copied and saved, a model that can be saved whole was expected; {remedy}"
    )


def _layers(model: Any) -> list[Any]:
    return list(model._flatten_layers(include_self=False))


def _variables(layer: Any) -> list[Any]:
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def _bins(layer: Any) -> Any:
    """Returns the bins that a layer has found in data."""
    is_adapted = isinstance(layer, keras.layers.Discretization) and layer.num_bins is not None
    return layer.bin_boundaries if is_adapted else None


def _has_bins(layer: Any) -> bool:
    return layer.bin_boundaries is not None
