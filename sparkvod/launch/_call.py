"""The call of the user's function on a rank, out of which a process that the function forked never comes.

A child of ``os.fork`` has its parent's whole stack above it. When it returned from the function, or raised out of it,
it would go on as the rank itself: end the world, and hand in a second result over the rank's own connection.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn


def call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns ``fn(*args, **kwargs)`` in the calling process; ends a child that comes back in its place.

    The child ends as a script would: with status 0 when it returned, with that of its ``SystemExit``, or with a
    traceback on its standard error and status 1.
    """
    mine = os.getpid()
    try:
        result = fn(*args, **kwargs)
    except BaseException as e:
        if os.getpid() != mine:
            _leave(e)
        raise
    if os.getpid() != mine:
        _leave(None)
    return result


def _leave(error: BaseException | None) -> NoReturn:
    status = 0
    try:
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
            if status and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
        elif error is not None:
            status = 1
            traceback.print_exception(error)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(status & 0xFF)  # nothing that was the rank's is cleaned up twice
