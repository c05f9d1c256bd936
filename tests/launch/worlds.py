"""Worlds of threads for the gathers: each rank's call in a thread, their outcomes by rank."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any


def together(calls: Sequence[Callable[[], Any]], timeout: float = 30) -> list[Any]:
    """Runs the calls at the same time; returns what each returned, or the exception that it raised."""
    outcomes: list[Any] = [None] * len(calls)

    def one(number: int) -> None:
        try:
            outcomes[number] = calls[number]()
        except Exception as e:
            outcomes[number] = e

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive(), "a rank hangs"
    return outcomes


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
