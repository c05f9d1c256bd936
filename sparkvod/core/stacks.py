"""What a late rank is doing: the Python stacks of all its threads, on request of the ranks that wait for it.

The engine learns in a negotiation that the others warn of this rank, and sends the process a signal. The handler is
faulthandler's, in C, so it works also where the main thread holds the interpreter and never comes back from a call.
"""

from __future__ import annotations

import faulthandler
import signal
import sys

from sparkvod import config
from sparkvod._native import Engine

# A real-time signal that nobody is known to use.
SIGNAL = signal.SIGRTMIN + 11
_STANDARD_ERROR = 2


def show_when_late(engine: Engine) -> None:
    """Lets the process show its stacks whenever ``engine`` is late, if the knob ``stall_stacks`` asks for it."""
    if not config.get("stall_stacks"):
        return
    try:
        descriptor = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        descriptor = _STANDARD_ERROR  # a notebook's stream, for example, has none
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True, chain=False)
    engine.set_stack_signal(SIGNAL)
