"""What a Param may hold: each check returns the value in its canonical form or says what it expected.

A check returns the very object it was given when that is canonical already, because scikit-learn's ``clone`` compares
by identity. Messages are the part after "... was found,"; :mod:`sparkvod.estimators.params` puts name and value before.
"""

from __future__ import annotations

import numbers as abstract_numbers
from collections.abc import Callable
from typing import Any

import numpy as np

from sparkvod.core.compression import check_compressor
from sparkvod.estimators.callbacks import Callback
from sparkvod.estimators.columns import numpy_dtype

Check = Callable[[Any], Any]


def anything(value: Any) -> Any:
    """Takes any value."""
    return value


def compression(value: Any) -> Any:
    """Takes None or what compresses gradients."""
    if value is not None:
        try:
            check_compressor(value, lossy=True)
        except TypeError:
            raise TypeError(
                "a member of Compression was expected, as Compression.fp16, .topk(0.01) or a .chain(...) of some"
            ) from None
    return value


def _is_bool(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_))


def integer(minimum: int, bits: int | None = None) -> Check:
    """Returns a check for whole numbers of at least ``minimum``, and below ``2**bits`` if that is given."""
    expected = f"a whole number of at least {minimum}" + (f" and below 2**{bits}" if bits else "") + " was expected"

    def check(value: Any) -> int:
        if isinstance(value, int) and not _is_bool(value):
            number = value
        elif not _is_bool(value) and isinstance(value, abstract_numbers.Real) and float(value).is_integer():
            number = int(float(value))
        else:
            raise TypeError(expected)
        if number < minimum or (bits is not None and number >= 1 << bits):
            raise ValueError(expected)
        return number

    return check


def seconds(value: Any) -> float:
    """Takes a number above 0."""
    if _is_bool(value) or not isinstance(value, abstract_numbers.Real):
        raise TypeError("a number of seconds above 0 was expected")
    if not 0 < float(value) < float("inf"):
        raise ValueError("a number of seconds above 0 was expected")
    return float(value)


def boolean(value: Any) -> bool:
    """Takes True or False."""
    if not _is_bool(value):
        raise TypeError("True or False was expected")
    return bool(value)


def string(value: Any) -> str:
    """Takes a string that is not empty."""
    if not isinstance(value, str):
        raise TypeError("a string was expected")
    if not value:
        raise ValueError("a string that is not empty was expected")
    return value


def choice(*valid: str) -> Check:
    """Returns a check for one of the strings ``valid``."""

    def check(value: Any) -> str:
        if value not in valid:
            raise ValueError(f"one of {', '.join(map(repr, valid))} was expected")
        return str(value)

    return check


def a_list(value: Any) -> list[Any]:
    """Takes a list, or a tuple, which becomes one."""
    if not isinstance(value, (list, tuple)):
        raise TypeError("a list was expected")
    return value if isinstance(value, list) else list(value)


def a_dict(value: Any) -> dict[str, Any]:
    """Takes a dict."""
    if not isinstance(value, dict):
        raise TypeError("a dict was expected")
    return value


def file_name(value: Any) -> str:
    """Takes a string that names one file or folder: no path, which could lead out of the store."""
    if "/" in string(value) or "\\" in value or value in (".", ".."):
        raise ValueError("a name without slashes, other than '.' and '..', was expected")
    return str(value)


def strings(value: Any) -> list[str]:
    """Takes a list of different strings; one string becomes a list of it."""
    if isinstance(value, str):
        value = [value]
    value = a_list(value)
    if not all(isinstance(name, str) and name for name in value):
        raise TypeError("a list of strings was expected")
    twice = sorted({name for name in value if value.count(name) > 1})
    if twice:
        raise ValueError(f"each name once was expected, {', '.join(twice)} came more often")
    return value


def names_or_none(value: Any) -> list[str | None]:
    """Takes a list of dtype names and None."""
    value = a_list(value)
    for name in value:
        if name is not None:
            numpy_dtype(name)  # raises TypeError for an unknown one
    return value


def some_strings(value: Any) -> list[str]:
    """Takes a list of different strings, one at least; one string becomes a list of it."""
    value = strings(value)
    if not value:
        raise ValueError("one name at least was expected, or None for all columns that are nothing else")
    return value


def loss_weights(value: Any) -> list[float]:
    """Takes a list of finite numbers of 0 or more: by a negative one, that loss would be made larger."""
    value = a_list(value)
    if not all(isinstance(item, abstract_numbers.Real) and np.isfinite(float(item)) for item in value):
        raise TypeError("a list of finite numbers was expected")
    if any(item < 0 for item in value):
        raise ValueError("numbers of 0 or more were expected")
    return value


def function(value: Any) -> Any:
    """Takes something that can be called."""
    if not callable(value):
        raise TypeError("something that can be called was expected")
    return value


def scheduler(value: Any) -> Any:
    """Takes a function of the optimizer; a scheduler is one of another optimizer, which is copied for training."""
    if not callable(value):
        raise TypeError(
            "a function of the optimizer that returns a scheduler was expected; write "
            "functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1) and the like"
        )
    return value


def groups(value: Any) -> list[Any]:
    """Takes a list of functions, or of lists of them."""
    if callable(value):
        raise TypeError("a list of functions was expected; write metrics=[f]")
    value = a_list(value)
    for group in value:
        if not all(callable(f) for f in (group if isinstance(group, (list, tuple)) else [group])):
            raise TypeError("functions f(output, label), or lists of them with one per label, were expected")
    return value


def callbacks(value: Any) -> list[Any]:
    """Takes a list of callbacks: objects with the methods of :class:`~sparkvod.estimators.callbacks.Callback`."""
    hooks = [name for name in vars(Callback) if name[0] != "_"]
    value = a_list(value)
    for item in value:
        if isinstance(item, type):
            raise TypeError(f"instances were expected, not classes; write {item.__name__}()")
        missing = [name for name in hooks if not callable(getattr(item, name, None))]
        if missing:
            raise TypeError(
                f"objects of subclasses of sparkvod.estimators.Callback were expected, a {type(item).__name__} has no "
                f"{missing[0]}()"
            )
    return value


def refuse_classes(name: str, value: Any, base: type) -> None:
    """Refuses a class where an instance is meant, also within lists and dicts: calling it would make an instance.

    Args:
        name: the Param.
        value: what it holds.
        base: classes below it are refused; others may be functions.

    Raises:
        ValueError: there is one.
    """
    if isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            refuse_classes(name, item, base)
    elif isinstance(value, type) and issubclass(value, base):
        raise ValueError(
            f"the class {value.__name__} was found in {name}, an instance of it was expected; write {value.__name__}()"
        )


def loss_weights_or_dict(value: Any) -> Any:
    """Takes a list of finite numbers of 0 or more, or a dict of them."""
    if isinstance(value, dict):
        loss_weights(list(value.values()))
        return value
    return loss_weights(value)


def keras_functions(value: Any) -> Any:
    """Takes something that can be called, or the name of one, or a list or dict of them."""
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]:
        if not callable(item) and not isinstance(item, str):
            raise TypeError("a name, a keras.losses.Loss or a function, or a list or dict of them, was expected")
    return list(value) if isinstance(value, tuple) else value


def keras_metrics(value: Any) -> Any:
    """Takes a list, or a dict by output."""
    if callable(value) or isinstance(value, str):
        raise TypeError("a list of metrics was expected; write metrics=[...]")
    return value if isinstance(value, dict) else a_list(value)


def functions(value: Any) -> Any:
    """Takes something that can be called (or the name of one, for frameworks that know names), or a list of them."""
    for item in value if isinstance(value, (list, tuple)) else [value]:
        if not callable(item) and not isinstance(item, str):
            raise TypeError("a function, or a list of functions, was expected")
    return list(value) if isinstance(value, tuple) else value


def shapes(value: Any) -> list[Any]:
    """Takes a list of shapes, each a list of whole numbers with at most one -1, or None for "as it is"."""
    value = a_list(value)
    for shape in value:
        if shape is None:
            continue
        if not isinstance(shape, (list, tuple)):
            raise TypeError("a list of shapes was expected, such as [[-1, 20]]")
        if not all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) and (n == -1 or n > 0) for n in shape):
            raise ValueError("dimensions above 0, or -1 for the rows, were expected")
        if sum(n == -1 for n in shape) > 1:
            raise ValueError("at most one -1 in each shape was expected")
    return value


def validation(value: Any) -> float | str:
    """Takes a share in [0, 1) or a column's name."""
    if isinstance(value, str):
        return string(value)
    if _is_bool(value) or not isinstance(value, abstract_numbers.Real):
        raise TypeError("a share of rows in [0, 1), or the name of a column, was expected")
    if not 0 <= float(value) < 1:
        raise ValueError("a share of rows in [0, 1) was expected")
    return float(value)


def backend(value: Any) -> Any:
    """Takes an object that runs functions on ranks."""
    if not (callable(getattr(value, "run", None)) and callable(getattr(value, "num_processes", None))):
        raise TypeError(
            "an object with run(fn, args, kwargs, env) and num_processes() was expected, such as a SparkBackend"
        )
    return value


def store(value: Any) -> Any:
    """Takes a Store, or a path or URL, which is made into one at fit."""
    if not isinstance(value, str) and not hasattr(value, "get_train_data_path"):
        raise TypeError("a Store, or its path or URL, was expected")
    return value
