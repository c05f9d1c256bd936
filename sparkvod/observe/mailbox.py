"""Live events from workers to the driver without a socket: a directory that both can reach.

A worker posts small dicts (log lines, progress, its failure); the driver polls. On a local file system each rank
appends lines of JSON to its own file, at once. Other file systems cannot append: there a rank writes numbered objects,
one for all events of a second. Nothing but JSON is ever read from a mailbox.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from sparkvod import log

_FLUSH_SECONDS = 1.0
# How long a worker waits at its end for the last events to be written.
_CLOSE_SECONDS = 60.0
_LOCAL_NAME = re.compile(r"rank-(\d+)\.jsonl$")
_OBJECT_NAME = re.compile(r"rank-(\d+)-(\d+)\.jsonl$")


class Poster(Protocol):
    """Where a worker posts its events."""

    def post(self, kind: str, **fields: Any) -> None:
        """Posts one event: ``fields`` must be JSON values; ``kind``, ``rank`` and ``time`` are added to them."""


class NullPoster:
    """Where nobody listens."""

    def post(self, kind: str, **fields: Any) -> None:
        """Does nothing."""


class Mailbox:
    """A directory of events. Give it to the workers as its url; each process makes its own object.

    Args:
        url: directory, anything that fsspec opens; the driver makes it with :meth:`create`.
        storage_options: options for fsspec.
    """

    def __init__(self, url: str, storage_options: dict[str, Any] | None = None) -> None:
        self.url, self.storage_options = url, dict(storage_options or {})
        self._fs: Any = None
        self._path = url
        self._local = "://" not in url and "::" not in url
        if not self._local:
            import fsspec  # here, because most mailboxes are local
            from fsspec.implementations.local import LocalFileSystem

            self._fs, self._path = fsspec.core.url_to_fs(url, **self.storage_options)
            self._local = isinstance(self._fs, LocalFileSystem)
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._files: dict[int, int] = {}
        self._pending: dict[int, list[str]] = {}
        self._written: dict[int, int] = {}
        self._flusher: threading.Thread | None = None
        self._wake = threading.Event()
        self._closed = False
        self._offsets: dict[str, int] = {}
        self._seen: set[str] = set()

    # --- the worker's side --------------------------------------------------------------------------------------

    def post(self, rank: int, kind: str, **fields: Any) -> None:
        """Posts one event of ``rank``. A mailbox that cannot be written costs a warning, never the job.

        A process forked from the worker may append to a local mailbox; on other file systems its events are dropped,
        because their clients do not live on in a fork.
        """
        if os.getpid() != self._pid:
            if not self._local:
                return
            self._pid, self._lock = os.getpid(), threading.Lock()  # the parent's may have been held
        line = json.dumps({"kind": kind, "rank": rank, "time": time.time(), **fields}, default=str) + "\n"
        try:
            with self._lock:
                if self._local:
                    self._append(rank, line.encode())
                else:
                    self._pending.setdefault(rank, []).append(line)
                    self._start_flusher()
        except FileNotFoundError:
            # The run is over, and its mailbox is gone: a rank that Spark is still ending must not make it anew.
            log.get("observe").debug("an event came too late for %s", self.url)
        except OSError as e:
            log.get("observe").warning("an event could not be posted to %s: %s", self.url, e)

    def put(self, name: str, data: bytes) -> str:
        """Stores what is too large for Spark beside the events; returns what :meth:`take` checks it by.

        Raises:
            OSError: it cannot be written.
        """
        if self._local:
            path = os.path.join(self._path, name)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(data)
        else:
            self._fs.pipe_file(f"{self._path}/{name}", data)
        return hashlib.sha256(data).hexdigest()

    def take(self, name: str, digest: str) -> bytes:
        """Returns what was :meth:`put`; safe to be unpickled if ``digest`` came over a trusted channel.

        Raises:
            OSError: it cannot be read, or is something else.
        """
        if self._local:
            with open(os.path.join(self._path, name), "rb") as file:
                data = file.read()
        else:
            data = bytes(self._fs.cat_file(f"{self._path}/{name}"))
        if hashlib.sha256(data).hexdigest() != digest:
            raise OSError(f"{self.url}/{name} holds {len(data)} bytes that are not those that were written there")
        return data

    def poster(self, rank: int) -> Poster:
        """Returns what posts in the name of ``rank``."""
        return _RankPoster(self, rank)

    def flush(self) -> None:
        """Writes what is still held back (file systems that cannot append)."""
        objects: dict[str, bytes] = {}
        with self._lock:  # and not while it is written: a store that hangs must not hold up who posts
            pending, self._pending = self._pending, {}
            for rank, lines in pending.items():
                number = self._written[rank] = self._written.get(rank, 0) + 1
                objects[f"{self._path}/rank-{rank}-{number:08d}.jsonl"] = "".join(lines).encode()
        for path, data in objects.items():
            self._fs.pipe_file(path, data)

    def close(self) -> None:
        """Writes what is held back and ends; posting again is allowed and opens it anew."""
        with self._lock:
            flusher, self._flusher, self._closed = self._flusher, None, True
            files, self._files = self._files, {}
        self._wake.set()
        if flusher is not None:
            flusher.join(_CLOSE_SECONDS)
            if flusher.is_alive():  # a store that does not answer must not keep the rank
                log.get("observe").warning(
                    "events could not be posted to %s within %g s: the last ones are lost", self.url, _CLOSE_SECONDS
                )
        for descriptor in files.values():
            os.close(descriptor)

    def _append(self, rank: int, line: bytes) -> None:
        if rank not in self._files:
            path = os.path.join(self._path, f"rank-{rank}.jsonl")
            self._files[rank] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        while line:
            line = line[os.write(self._files[rank], line) :]

    def _start_flusher(self) -> None:
        if self._flusher is None:
            self._closed = False
            self._wake.clear()
            self._flusher = threading.Thread(target=self._flush_often, name="sparkvod-mailbox-flush", daemon=True)
            self._flusher.start()

    def _flush_often(self) -> None:
        while not self._closed:
            self._wake.wait(_FLUSH_SECONDS)
            self._flush_or_warn()
        self._flush_or_warn()  # what was posted during the last one

    def _flush_or_warn(self) -> None:
        try:
            self.flush()
        except OSError as e:
            log.get("observe").warning("events could not be posted to %s: %s", self.url, e)

    # --- the driver's side --------------------------------------------------------------------------------------

    def create(self) -> None:
        """Makes the directory.

        Raises:
            OSError: it cannot be made.
        """
        if self._local:
            os.makedirs(self._path, exist_ok=True)
        else:
            self._fs.makedirs(self._path, exist_ok=True)

    def read_new(self) -> list[dict[str, Any]]:
        """Returns the events that came since the last call, each rank's in order, merged by time."""
        events = self._read_appended() if self._local else self._read_objects()
        return sorted(events, key=lambda event: event.get("time", 0.0))

    def remove(self) -> None:
        """Deletes the directory with everything in it."""
        try:
            shutil.rmtree(self._path) if self._local else self._fs.rm(self._path, recursive=True)
        except FileNotFoundError:
            return  # nothing was ever posted
        except OSError as e:
            log.get("observe").warning("the mailbox %s could not be deleted: %s", self.url, e)

    def _read_appended(self) -> list[dict[str, Any]]:
        try:
            names = sorted(os.listdir(self._path))
        except FileNotFoundError:
            return []
        events: list[dict[str, Any]] = []
        for name in names:
            if not _LOCAL_NAME.match(name):
                continue
            with open(os.path.join(self._path, name), "rb") as file:
                file.seek(self._offsets.get(name, 0))
                data = file.read()
            complete = data[: data.rfind(b"\n") + 1]  # the end of a line may still be on its way
            self._offsets[name] = self._offsets.get(name, 0) + len(complete)
            events += _parse(complete, name)
        return events

    def _read_objects(self) -> list[dict[str, Any]]:
        self._fs.invalidate_cache(self._path)
        try:
            paths = sorted(self._fs.ls(self._path, detail=False))
        except FileNotFoundError:
            return []
        events: list[dict[str, Any]] = []
        for path in paths:
            name = path.rsplit("/", 1)[-1]
            if _OBJECT_NAME.match(name) and name not in self._seen:
                events += _parse(self._fs.cat_file(path), name)
                self._seen.add(name)
        return events


class _RankPoster:
    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        self._mailbox, self._rank = mailbox, rank

    def post(self, kind: str, **fields: Any) -> None:
        self._mailbox.post(self._rank, kind, **fields)


def _parse(data: bytes, name: str) -> list[dict[str, Any]]:
    events = []
    for line in data.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict) and isinstance(event.get("kind"), str) and isinstance(event.get("rank"), int):
            events.append(event)
        else:
            log.get("observe").warning("a line of %s is no event: %.100r", name, line)
    return events


_null = NullPoster()
_current: Poster = _null


def current() -> Poster:
    """Returns this worker's poster; one that drops everything when no launcher listens."""
    return _current


@contextmanager
def use(poster: Poster) -> Iterator[Poster]:
    """Sets the process's poster for the body."""
    global _current
    before, _current = _current, poster
    try:
        yield poster
    finally:
        _current = before
