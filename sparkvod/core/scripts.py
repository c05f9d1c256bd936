"""A script's own end by an error, told to the other ranks.

A launcher reports how its function ended. A script that torchrun, or the environment, made a rank has nobody to do
so: its peers would learn that the world was shut down, and not why. So while such a rank is in a world, what nobody
caught passes through here on its way to the traceback, and ``sys.exit`` notes with which status it was called.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any


class Watch:
    """Watches how the script ends, until :meth:`stop`.

    Args:
        ended: called with the words for an end by an uncaught exception, before it is shown.
    """

    def __init__(self, ended: Callable[[str], None]) -> None:
        self._ended: Callable[[str], None] | None = ended
        self._exit_words = ""
        self._hook_before, self._exit_before = sys.excepthook, sys.exit
        # Kept, because a bound method is a new object each time, and stop() must know its own.
        self._my_hook, self._my_exit = self._excepthook, self._exit
        sys.excepthook = self._my_hook
        sys.exit = self._my_exit

    def stop(self) -> None:
        """Puts back what was there; what others have put on top since goes on through here, without effect."""
        self._ended = None
        if sys.excepthook == self._my_hook:
            sys.excepthook = self._hook_before
        if sys.exit == self._my_exit:
            sys.exit = self._exit_before

    def end_of_process(self) -> str:
        """Returns words for an end by ``sys.exit`` with a failure, '' for one in order; asked while Python exits."""
        return self._exit_words

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # At a prompt the process goes on after an error.
        if self._ended is not None and not hasattr(sys, "ps1") and not sys.flags.interactive:
            self._ended(f"raised {kind.__name__}: {error}" if str(error) else f"raised {kind.__name__}")
        self._hook_before(kind, error, trace)

    def _exit(self, status: Any = None) -> Any:
        if threading.current_thread() is threading.main_thread():  # elsewhere it ends the thread alone
            failed = status is not None and status != 0
            self._exit_words = f"called sys.exit({status!r})" if failed else ""
        return self._exit_before(status)
