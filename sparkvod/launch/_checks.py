"""What a launcher's caller may get wrong, found before anything starts."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any


def check_call(fn: Any, args: Any, kwargs: Any) -> None:
    """Checks a function and its arguments.

    Raises:
        TypeError: they can be no call.
    """
    if not callable(fn):
        raise TypeError(
            f"fn={_short(fn)} was found, a function was expected; pass the function itself and not its result: "
            "run(train, args=(...))"
        )
    if not isinstance(args, (tuple, list)):
        instead = (
            "pass a dict as kwargs" if isinstance(args, Mapping) else f"for one argument say args=({_short(args)},)"
        )
        raise TypeError(f"args={_short(args)} was found, a tuple or list was expected; {instead}")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        raise TypeError(
            f"kwargs={_short(kwargs)} was found, a dict of keyword arguments was expected, whose keys are strings; "
            "pass arguments by position as args"
        )


def check_count(name: str, value: Any) -> int:
    """Returns a number of ranks.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is below 1.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)  # NumPy's integers too
    except TypeError:
        raise TypeError(
            f"{name}={_short(value)} was found, a whole number was expected; it is the number of ranks"
        ) from None
    if count < 1:
        raise ValueError(f"{name}={count} was found, at least 1 rank was expected; leave it out for the default")
    return count


def check_env(env: Any) -> None:
    """Checks environment variables for the ranks.

    Raises:
        TypeError: it is no dict by name.
        ValueError: no variable can have such a name.
    """
    if env is None:
        return
    if not isinstance(env, Mapping) or not all(isinstance(name, str) for name in env):
        raise TypeError(
            f"env={_short(env)} was found, a dict of variables was expected, such as {{'OMP_NUM_THREADS': '1'}}"
        )
    for name in env:
        if not name or "=" in name or "\0" in name:
            raise ValueError(f"env names a variable {name!r}, a name without '=' was expected; pass its value as value")


def check_handler(on_event: Any) -> None:
    """Raises ``TypeError`` if ``on_event`` can take no event."""
    if on_event is not None and not callable(on_event):
        raise TypeError(f"on_event={_short(on_event)} was found, a function of one event or None was expected")


def check_seconds(name: str, value: Any) -> float | None:
    """Returns a time; None, where there is none, stays None.

    Raises:
        TypeError: it is no number.
        ValueError: it is not above 0.
    """
    if value is None:
        return None
    wrong = f"{name}={_short(value)} was found, a number of seconds above 0 was expected; leave it out for the default"
    if isinstance(value, (str, bytes, bool)):
        raise TypeError(wrong)
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        raise TypeError(wrong) from None
    if math.isnan(seconds) or seconds <= 0:
        raise ValueError(wrong)
    return seconds


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
