"""What the user passed, as bytes for the workers and for saving. For all frameworks; no Spark is needed."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import cloudpickle


def dump_part(name: str, part: Any) -> bytes:
    """Returns what the user passed as the Param ``name``, pickled.

    Raises:
        TypeError: it cannot be pickled.
    """
    try:
        return cloudpickle.dumps(part)
    except Exception as error:
        raise TypeError(
            f"{name} cannot be pickled ({type(error).__name__}: {error}), something that can be sent to the workers "
            "was expected; it must not hold a Spark session, a lock, a file or a connection"
        ) from error


def is_builder(model: Any) -> bool:
    """Return whether the Param ``model`` is a function that builds a model."""
    return inspect.isroutine(model) or isinstance(model, functools.partial)


def built(model: Any, kind: type, name: str) -> Any:
    """Return the model that a function builds, or None where the model itself was given.

    Args:
        model: the Param.
        kind: class of models.
        name: its name, for messages.

    Raises:
        ValueError: the function raises, or returns something else.
    """
    if not is_builder(model):
        return None
    function = getattr(model, "__qualname__", None) or repr(model)
    try:
        made = model()
    except Exception as error:
        raise ValueError(
            f"model={function} raised {type(error).__name__}: {error}. It must build a {name} when it is called "
            "without arguments"
        ) from error
    if not isinstance(made, kind):
        raise ValueError(f"model={function} must return a {name}, got a {type(made).__name__}")
    return made
