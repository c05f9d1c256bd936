"""What an object of Keras holds besides its configuration, by which a rank makes it again.

An attribute that was set on an optimizer, loss or metric after its constructor, or that its ``get_config()`` leaves
out, would be the class's default on the ranks. So these attributes travel along.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import keras

from sparkvod.estimators.keras.custom import found_in_parts

#: Attributes by which Keras and its backends keep track of an object and of its variables.
_KEPT_BY_KERAS = (
    *("_tracker", "_lock", "built", "_distribution_strategy", "_trainable_variables", "_trainable_variables_indices"),
    *("_exclude_from_weight_decay", "_exclude_from_weight_decay_cache", "_sparkvod", "_built", "_dtype_policy"),
)

Attributes = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Within:
    """Attributes of an object that is itself an attribute, such as a learning-rate schedule."""

    attributes: Attributes


def attributes_of(thing: Any, custom_objects: Mapping[str, Any]) -> Attributes:
    """Return the attributes that an object made from the configuration alone would lack, by name.

    Args:
        thing: an optimizer, loss or metric.
        custom_objects: classes and functions by name.

    Raises:
        ValueError: such an attribute cannot be pickled.
    """
    cls = getattr(type(thing), "_sparkvod_plain", type(thing))
    try:
        with keras.saving.custom_object_scope({**found_in_parts(thing), **custom_objects}):
            copy = cls.from_config(thing.get_config())
    except Exception:  # whoever makes the real copy reports it
        return ()
    return _lacking(thing, copy)


def give(thing: Any, attributes: Attributes) -> None:
    """Set attributes that :func:`attributes_of` returned."""
    for name, value in attributes:
        if isinstance(value, Within):
            give(getattr(thing, name), value.attributes)
        else:
            setattr(thing, name, value)


def _lacking(thing: Any, copy: Any) -> Attributes:
    found: list[tuple[str, Any]] = []
    theirs = vars(copy)
    for name, mine in vars(thing).items():
        if name in _KEPT_BY_KERAS or name.startswith("_self_") or _has_variables(mine):
            continue
        value, other = untracked(mine), untracked(theirs.get(name))
        if name not in theirs and isinstance(value, list) and not value:  # where a built optimizer would have variables
            continue
        if hasattr(value, "get_config") and type(value) is type(other):
            if within := _lacking(value, other):
                found.append((name, Within(within)))
        elif name not in theirs or not _same(value, other):
            _require_pickle(thing, name, value)
            found.append((name, value))
    return tuple(found)


def untracked(value: Any) -> Any:
    """Return the lists, dicts and sets by which Keras tracks variables as Python's own."""
    if isinstance(value, dict):
        return {key: untracked(item) for key, item in value.items()}
    for kind in (list, set):
        if isinstance(value, kind):
            return kind(map(untracked, value))
    return value


def _has_variables(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple, set)):
        return any(_has_variables(item) for item in value)
    return isinstance(value, keras.Variable)


def _same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    try:
        return bool(cloudpickle.dumps(value) == cloudpickle.dumps(other))
    except Exception:  # what cannot be pickled was made alike from the configuration
        return True


def _require_pickle(thing: Any, name: str, value: Any) -> None:
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        raise ValueError(
            f"attribute {name!r} of {type(thing).__name__} cannot be sent to the ranks ({type(error).__name__}: "
            f"{error}) and is not in its get_config(): make it in the constructor from what get_config() returns, or "
            "remove it"
        ) from error
