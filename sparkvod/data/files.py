"""Single files on any fsspec file system: whole writes, reads by name, exclusive creation, deletion.

Nothing here asks a listing, or whether a file exists, before it acts: listings of some stores are seconds behind, and
what fsspec's clients cache of them longer.
"""

from __future__ import annotations

import errno
import os
import uuid
from contextlib import suppress
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from sparkvod import log

_log = log.get("data")
IN_PLACE = frozenset({"hdfs", "arrow_hdfs", "webhdfs", "webHDFS", "sftp", "ssh", "smb", "ftp", "dbfs"})
"""Protocols of file systems that show a file while it is being written, as object stores do not."""
OBJECTS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss", "cos"})
"""Protocols of stores without directories, where making one would make a bucket of a misspelt name."""
_OLD = ".replaced"


def failures(fs: AbstractFileSystem) -> tuple[type[Exception], ...]:
    """Returns what is raised when a file system fails: clients of remote ones have errors of their own."""
    return (OSError,) if isinstance(fs, LocalFileSystem) else (Exception,)


def is_full(error: BaseException | None) -> bool:
    """Returns whether a write failed because there is no room left, on the disk or in a quota."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


def read(fs: AbstractFileSystem, path: str) -> bytes:
    """Returns a file's bytes.

    Raises:
        FileNotFoundError: there is no such file.
    """
    fs.invalidate_cache()
    try:
        return bytes(fs.cat_file(path))
    except FileNotFoundError:
        if not _in_place(fs):
            raise
        return bytes(fs.cat_file(path + _OLD))  # of a writer that was killed between its two renames


def open_to_read(fs: AbstractFileSystem, path: str) -> Any:
    """Returns an open file, for those who read a part of it.

    Raises:
        FileNotFoundError: there is no such file.
    """
    fs.invalidate_cache()
    try:
        return fs.open(path, "rb")
    except FileNotFoundError:
        if not _in_place(fs):
            raise
        return fs.open(path + _OLD, "rb")


def open_to_write(fs: AbstractFileSystem, path: str) -> Any:
    """Returns an open new file for those who write in parts; on a local file system nobody but its owner may write it.

    Raises:
        OSError: it cannot be made; elsewhere than on a local file system see :func:`failures`.
    """
    if isinstance(fs, LocalFileSystem):
        return open(fs._strip_protocol(path), "wb", opener=_opened)
    return fs.open(path, "wb")


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags, 0o644)  # whatever the umask: what is in a checkpoint may be run


def make_directory(fs: AbstractFileSystem, path: str) -> None:
    """Makes a directory and those above it, where the file system has any.

    Raises:
        OSError: it cannot be made; elsewhere than on a local file system see :func:`failures`.
    """
    if not _speaks(fs, OBJECTS):
        fs.makedirs(path, exist_ok=True)


def write(fs: AbstractFileSystem, path: str, data: bytes) -> None:
    """Writes a file so that :func:`read` gives the old content or the new one, never a part.

    On a local file system a temporary file beside it is synced and renamed. File systems that show a file while it is
    written get one beside it too, and two renames, because few of them rename onto a file. Object stores get one put,
    which they make visible at once. Missing directories are made.

    Raises:
        OSError: the file cannot be written; elsewhere than on a local file system see :func:`failures`.
    """
    if isinstance(fs, LocalFileSystem):
        _write_local(str(fs._strip_protocol(path)), data)
        return
    make_directory(fs, fs._parent(path))
    if not _in_place(fs):
        fs.pipe_file(path, data)
        return
    temporary = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        fs.pipe_file(temporary, data)
        replaces = fs.exists(path)
        if replaces:
            delete(fs, path + _OLD)
            fs.mv(path, path + _OLD)
        fs.mv(temporary, path)
    except BaseException:
        with suppress(*failures(fs)):
            delete(fs, temporary)
        raise
    if replaces:
        delete(fs, path + _OLD)


def _write_local(target: str, data: bytes) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    temporary = f"{target}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        with open(temporary, "wb", opener=_opened) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def create(fs: AbstractFileSystem, path: str, data: bytes) -> bool | None:
    """Writes a file only if it is not there yet, atomically.

    Returns:
        True when this call made the file, False when it was there, None when the file system cannot tell.

    Raises:
        OSError: the file cannot be written; elsewhere than on a local file system see :func:`failures`.
    """
    if isinstance(fs, LocalFileSystem):
        os.makedirs(os.path.dirname(fs._strip_protocol(path)), exist_ok=True)
        try:
            with open(fs._strip_protocol(path), "xb", opener=_opened) as file:
                file.write(data)
        except FileExistsError:
            return False
        return True
    if not isinstance(fs, AsyncFileSystem) and type(fs).pipe_file is AbstractFileSystem.pipe_file:
        return None  # it looks first and writes then
    make_directory(fs, fs._parent(path))
    try:
        fs.pipe_file(path, data, mode="create")
    except FileExistsError:
        return False
    except (NotImplementedError, TypeError, ValueError) as error:
        # File systems differ in how they refuse the mode. Any other fault meets the caller's plain write again.
        _log.debug("%s was not created exclusively: %s: %s", path, type(error).__name__, error)
        return None
    if isinstance(fs, MemoryFileSystem):
        return True
    # Some servers that speak S3 pass over the condition: one that lets us do it again lets others do it too.
    try:
        fs.pipe_file(path, data, mode="create")
    except FileExistsError:
        return True
    return None


def size(fs: AbstractFileSystem, path: str) -> int | None:
    """Returns the bytes of a file, by opening it; None when it is not there."""
    fs.invalidate_cache()
    try:
        with fs.open(path, "rb") as file:
            return int(file.seek(0, os.SEEK_END))
    except FileNotFoundError:
        return None


def delete(fs: AbstractFileSystem, path: str) -> None:
    """Deletes a file; nothing happens when it is not there."""
    with suppress(FileNotFoundError):
        fs.rm_file(path)


def _in_place(fs: AbstractFileSystem) -> bool:
    return _speaks(fs, IN_PLACE)


def _speaks(fs: AbstractFileSystem, protocols: frozenset[str]) -> bool:
    own: Any = fs.protocol
    return bool(protocols.intersection([own] if isinstance(own, str) else own))
