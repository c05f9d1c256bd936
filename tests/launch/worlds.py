"""Worlds for tests: of threads, for the gathers, and of scripts that meet by the environment."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sparkvod import config

ROOT = Path(__file__).resolve().parents[2]


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


@contextlib.contextmanager
def scripts(arguments: Sequence[str], size: int, **variables: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts the ranks of a world that meets at a free port of this host; in the end none is left.

    Args:
        arguments: of the interpreter, the same for every rank.
        size: number of ranks.
        variables: of their environment, beside or instead of what they need to meet.

    Yields:
        The processes by rank, whose output is to be read by ``communicate``.
    """
    environment = {
        **config.environment(),
        "PYTHONPATH": str(ROOT),
        "SPARKVOD_SIZE": str(size),
        "SPARKVOD_RENDEZVOUS": f"127.0.0.1:{free_port()}",
        **variables,
    }
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(size):
            processes.append(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    env={**environment, "SPARKVOD_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()
