"""Functions and results as bytes."""

from __future__ import annotations

import io
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle


class _Pickler(cloudpickle.Pickler):
    """Keeps the file names of code that travels by value, so that a worker's traceback tells them."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is types.CodeType:
            make, arguments = self.dispatch_table[types.CodeType](obj)[:2]
            return _named_code, (make, arguments, obj.co_filename)
        return super().reducer_override(obj)


def _named_code(make: Callable[..., types.CodeType], arguments: tuple[Any, ...], filename: str) -> types.CodeType:
    return make(*arguments).replace(co_filename=filename)


def dump_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    """Returns (fn, args, kwargs) as bytes; lambdas, closures and functions of ``__main__`` by value.

    Raises:
        TypeError: something in it cannot be pickled.
    """
    file = io.BytesIO()
    try:
        _Pickler(file).dump((fn, tuple(args), dict(kwargs or {})))
    except Exception as e:
        raise TypeError(
            f"the function or its arguments cannot be pickled ({e}), and so not be sent to the ranks; sessions, "
            "DataFrames, open files, locks and the like must be made inside the function"
        ) from e
    return file.getvalue()


def dump_result(result: Any, rank: int) -> bytes:
    """Returns a rank's result as bytes.

    Raises:
        TypeError: it cannot be pickled.
    """
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as e:
        raise TypeError(
            f"the result of rank {rank}, of type {type(result).__name__}, cannot be pickled ({e}); "
            "return something that can"
        ) from e
