"""An all-gather of bytes through a private directory, for ranks of one host.

Spark's barrier looks only once a second whether the others have come. Where the driver has made a directory that no
other user can enter, the ranks meet there in milliseconds.
"""

from __future__ import annotations

import os
import socket
import stat
import time

from sparkvod.errors import CollectiveTimeoutError
from sparkvod.launch.context import missing_ranks


def is_private(directory: str) -> bool:
    """Tells whether ``directory`` exists, is this user's, and is closed to everybody else."""
    try:
        info = os.lstat(directory)
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077


class FileGather:
    """A repeatable all-gather among ``size`` processes that share a private directory.

    Args:
        directory: the directory; one world uses it once.
        rank: this process's rank.
        size: number of ranks.
        timeout: seconds within which one gather must end.
    """

    def __init__(self, directory: str, rank: int, size: int, timeout: float) -> None:
        self._directory, self._rank, self._size, self._timeout = directory, rank, size, timeout
        self._generation = 0

    def __call__(self, data: bytes) -> list[bytes]:
        """Gathers the data of all ranks, in rank order.

        Raises:
            CollectiveTimeoutError: not all ranks came within the deadline; names those that are missing.
        """
        generation, self._generation = self._generation, self._generation + 1
        mine = self._path(generation, self._rank)
        # The world's secret is in it.
        with open(os.open(f"{mine}.part", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
        os.rename(f"{mine}.part", mine)  # the others see all of it or nothing
        everybody: dict[int, bytes] = {self._rank: data}
        deadline, pause = time.monotonic() + self._timeout, 0.001
        while len(everybody) < self._size:
            for rank in range(self._size):
                if rank not in everybody:
                    try:
                        with open(self._path(generation, rank), "rb") as file:
                            everybody[rank] = file.read()
                    except FileNotFoundError:
                        continue
            if len(everybody) < self._size:
                if time.monotonic() > deadline:
                    missing = [rank for rank in range(self._size) if rank not in everybody]
                    raise CollectiveTimeoutError(
                        missing_ranks(missing, self._size, socket.gethostname(), self._timeout)
                    )
                time.sleep(pause)
                pause = min(pause * 1.5, 0.02)
        return [everybody[rank] for rank in range(self._size)]

    def _path(self, generation: int, rank: int) -> str:
        return os.path.join(self._directory, f"gather-{generation}-{rank}")
