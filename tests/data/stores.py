"""Stores that tests make: a server that speaks S3, a listing that is seconds behind, file systems that note options.

Spark's workers import this module when they unpickle a :class:`LaggingStore`; so they know the protocol ``lagging``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import _registry
from fsspec.spec import AbstractFileSystem

from sparkvod.data import FilesystemStore

LAG_SECONDS = 2.0
KEY, SECRET = "AKIDTESTONLY", "not-to-be-seen-anywhere"


class LaggingFileSystem(AbstractFileSystem):
    """A local directory of which ``ls``, ``find``, ``exists`` and ``info`` do not show what is younger than 2 s.

    Files are opened, written and deleted by their names at once, as objects are.
    """

    protocol = "lagging"
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._local = LocalFileSystem(auto_mkdir=True)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return "/" + str(path).removeprefix("lagging://").strip("/")

    def _shown(self, entry: dict[str, Any]) -> bool:
        return entry["type"] == "directory" or time.time() - float(entry["mtime"]) >= LAG_SECONDS

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        found = [entry for entry in self._local.ls(self._strip_protocol(path), detail=True) if self._shown(entry)]
        return found if detail else [entry["name"] for entry in found]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._local.info(self._strip_protocol(path))
        if not self._shown(found):
            raise FileNotFoundError(path)
        return found

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> Any:
        return self._local.open(path, mode)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._local.makedirs(self._strip_protocol(path), exist_ok=exist_ok)

    def rm_file(self, path: str) -> None:
        self._local.rm_file(self._strip_protocol(path))

    def rmdir(self, path: str) -> None:
        self._local.rmdir(self._strip_protocol(path))


class LaggingStore(FilesystemStore):
    """A store on :class:`LaggingFileSystem`."""


fsspec.register_implementation("lagging", LaggingFileSystem, clobber=True)


@contextmanager
def noting(protocol: str, root: Path) -> Iterator[list[dict[str, Any]]]:
    """Registers a file system in a local directory for a protocol; gives the options that it was made with."""
    made: list[dict[str, Any]] = []
    name = protocol

    class Noting(LaggingFileSystem):
        protocol = name

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            made.append(options)

        @classmethod
        def _strip_protocol(cls, path: Any) -> str:
            text = str(path)
            return text if text.startswith(f"{root}/") else f"{root}/{text.removeprefix(f'{name}://').strip('/')}"

        def unstrip_protocol(self, path: str) -> str:
            return f"{name}://{self._strip_protocol(path).removeprefix(f'{root}/')}"

        def _shown(self, entry: dict[str, Any]) -> bool:
            return True

        def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
            first, second = self._strip_protocol(path1), self._strip_protocol(path2)
            if os.path.exists(second):  # as HDFS has it
                raise FileExistsError(second)
            os.rename(first, second)

    before = _registry.get(protocol)
    fsspec.register_implementation(protocol, Noting, clobber=True)
    try:
        yield made
    finally:
        del _registry[protocol]
        if before is not None:
            _registry[protocol] = before


@contextmanager
def s3_server() -> Iterator[dict[str, Any]]:
    """Starts a server that speaks S3, with the bucket ``bucket``; gives the storage options for it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        options = {"key": KEY, "secret": SECRET, "endpoint_url": f"http://{host}:{port}"}
        # What servers hold is the process's: the bucket of an earlier one would still be there.
        urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST"), timeout=10).close()
        fsspec.filesystem("s3", **options).mkdir("bucket")
        yield options
    finally:
        server.stop()
