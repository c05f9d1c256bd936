"""Temporary folders that only this user can enter, and that a later start removes when their process was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import weakref

from sparkvod import log

RUN, STORE = "sparkvod-run-", "sparkvod-store-"
"""What the names of folders begin with: those of a run, and those of an estimator's temporary store."""
# A younger folder may not be locked yet.
_YOUNG_SECONDS = 60.0


class PrivateFolder:
    """A folder of mode 0700 in the temporary directory, locked as long as this process lives.

    The lock goes with the process however that ends. So a folder of ours that nobody has locked is a leftover; each
    new folder removes those that it finds. A folder that is not removed goes with this object, or with the process.

    Args:
        prefix: what its name begins with.
    """

    def __init__(self, prefix: str = RUN) -> None:
        _remove_leftovers()
        self.path = tempfile.mkdtemp(prefix=prefix)
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a file system without locks: there, no folder is taken for a leftover
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._end = weakref.finalize(self, _delete, self.path, descriptor, os.getpid())

    def remove(self) -> None:
        """Deletes the folder with all that is in it."""
        self._end()


def _delete(path: str, descriptor: int, owner: int) -> None:
    if os.getpid() == owner:  # and not in a process that was forked meanwhile
        shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)


def _remove_leftovers() -> None:
    with os.scandir(tempfile.gettempdir()) as entries:
        found = [entry.path for entry in entries if entry.name.startswith((RUN, STORE))]
    for path in found:
        try:
            _remove_leftover(path)
        except OSError as e:  # another user's, in use, or gone meanwhile
            log.get("launch").debug("%s is left alone: %s", path, e)


def _remove_leftover(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        info = os.fstat(descriptor)
        if info.st_uid != os.geteuid() or time.time() - info.st_mtime < _YOUNG_SECONDS:
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
        log.get("launch").info("removed %s, which a process that was killed has left", path)
    finally:
        os.close(descriptor)
