"""Who prepares, or has prepared, which numbered data set of a store; and the removal of those that nobody needs.

A driver claims a number by a small file in the training directory. It holds the driver's host and process and a time,
which is renewed when the data are used again and when they are released.
"""

from __future__ import annotations

import itertools
import json
import os
import posixpath
import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparkvod import log
from sparkvod.data.store import FilesystemStore
from sparkvod.errors import StoreError

CLAIM = "_claim"
"""Name of the file that says that somebody prepares, or has prepared, data in this directory."""
_TRIES = 20
_log = log.get("data")


def claim(store: FilesystemStore) -> int:
    """Returns a number that no other data set has, and marks it as taken.

    Where the file system can create a file exclusively, it is the smallest free one; elsewhere a random one of 62 bits.

    Raises:
        StoreError: the directories of data cannot be made.
    """
    taken = _numbers(store)
    failed = 0
    for idx in itertools.count():
        if idx in taken:
            continue
        try:
            created = store.create_exclusive(_path(store, idx), _owner())
        except StoreError:
            # Another driver may be removing the directory under our feet.
            failed += 1
            if failed == _TRIES:
                raise
            continue
        if created:
            return idx
        if created is None:
            break
    idx = random.getrandbits(62)
    store.write_bytes(_path(store, idx), _owner())
    return idx


def renew(store: FilesystemStore, idx: int) -> None:
    """Notes that a data set was used now, if it is there and can be written."""
    try:
        if store.exists(_path(store, idx)):
            store.write_bytes(_path(store, idx), _owner())
    except store.failures as error:  # StoreError is one of them
        _log.warning("the use of %s cannot be noted: %s", store.get_train_data_path(idx), error)


def remove(store: FilesystemStore, idx: int) -> None:
    """Deletes a data set; the claim goes last, so that nobody takes its number before the rest is gone."""
    try:
        store.delete(store.get_val_data_path(idx))
        path = store.get_train_data_path(idx)
        for name in store.listing(path):
            if name != CLAIM:
                store.delete_file(posixpath.join(path, name))
        store.delete_file(_path(store, idx))
        with suppress(OSError):  # not empty: another driver has just taken the number
            if store.exists(path):
                store.fs.rmdir(path)
    except store.failures as error:
        _log.warning("the unused data %s could not be deleted: %s", store.get_train_data_path(idx), error)


def sweep(store: FilesystemStore, age: float, spare: Callable[[int], bool]) -> list[int]:
    """Deletes data sets that nobody needs; see ``sparkvod.data.clean``.

    Args:
        store: the store.
        age: seconds since the last use above which a data set may go.
        spare: tells of a number that this driver has claimed whether it may go; then it must not be used any more.

    Returns:
        The numbers of the data sets that were deleted.
    """
    removed = []
    for idx in sorted(_numbers(store)):
        try:
            owner = json.loads(store.read(_path(store, idx)))
            unused = time.time() - float(owner["time"])
        except (OSError, ValueError, KeyError, TypeError):  # no claim of ours, or one that somebody removes just now
            continue
        if unused <= age:
            continue
        mine = {**_identity(), "time": owner["time"]} == owner
        if not spare(idx) if mine else _lives(owner):
            continue
        remove(store, idx)
        if not store.exists(_path(store, idx)):
            removed.append(idx)
            _log.info("%s was deleted, it was last used %.0f s ago", store.get_train_data_path(idx), unused)
    return removed


def _path(store: FilesystemStore, idx: int) -> str:
    return posixpath.join(store.get_train_data_path(idx), CLAIM)


def _identity() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "started": _started(pid)}


def _owner() -> bytes:
    return json.dumps({**_identity(), "time": time.time()}).encode()


def _lives(owner: dict[str, Any]) -> bool:
    """Tells whether the owner is a living process of this host."""
    pid = owner.get("pid")
    if owner.get("host") != socket.gethostname() or not isinstance(pid, int) or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it lives, as somebody else's
        return True
    return owner.get("started") is None or owner["started"] == _started(pid)


def _started(pid: int) -> int | None:
    """Returns when a process started, in the kernel's ticks, so that its number can be told from a later one's."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return int(stat.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):  # no such process, or no /proc
        return None


def _numbers(store: FilesystemStore) -> set[int]:
    """Returns the numbers of the data sets that are there."""
    found = set()
    for path in (store.get_train_data_path(), store.get_val_data_path()):
        folder, name = posixpath.split(store.get_localized_path(path))
        for entry in _entries(store, folder):
            stem, dot, number = posixpath.basename(entry.rstrip("/")).rpartition(".")
            if stem == name and dot and number.isdecimal():
                found.add(int(number))
    return found


def _entries(store: FilesystemStore, folder: str) -> list[str]:
    if not store.exists(folder):
        return []
    try:
        return list(store.fs.ls(folder, detail=False, refresh=True))
    except TypeError:  # a file system that keeps no listings
        return list(store.fs.ls(folder, detail=False))
