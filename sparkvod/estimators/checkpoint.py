"""A run's checkpoint: one file, written whole or not at all, that says what run it belongs to.

A zip archive of stored (uncompressed) members, so that a damaged file is noticed by its checksums: ``header.json``,
the framework's states by name under ``state/``, each rank's own state under ``rank/``.
"""

from __future__ import annotations

import io
import json
import posixpath
import struct
import threading
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sparkvod.errors import StoreError

_VERSION = 2
#: What reading an archive of any bytes raises; an OSError is the file system's own.
_DAMAGES = (zipfile.BadZipFile, KeyError, ValueError, RuntimeError, EOFError, ArithmeticError, zlib.error, struct.error)
_active: set[str | None] = set()
_lock = threading.Lock()
#: Names in fingerprints that only the sums of an epoch under way depend on.
FREE_BETWEEN_EPOCHS = ("metrics",)


@dataclass
class Checkpoint:
    """Where a run stands.

    Attributes:
        epoch: epoch that comes next, from 0.
        step: step of that epoch that comes next; not 0 only for a checkpoint within an epoch.
        seed: the run's seed.
        history: the records of the epochs done.
        fingerprint: what the run depends on, by name; a run with another one does not go on from here.
        state: the framework's states, the same on all ranks: model, optimizer, scheduler.
        ranks: each rank's own state: its random number generators, and of an epoch that is under way the sums and
            what else the ranks have each for itself.
    """

    epoch: int
    step: int
    seed: int
    history: list[dict[str, Any]]
    fingerprint: dict[str, Any]
    state: dict[str, bytes] = field(default_factory=dict)
    ranks: list[bytes] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        """Returns the file's content."""
        header = {
            "version": _VERSION,
            "epoch": self.epoch,
            "step": self.step,
            "seed": self.seed,
            "history": self.history,
            "fingerprint": self.fingerprint,
            "ranks": len(self.ranks),
        }
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("header.json", json.dumps(header))
            for name, content in self.state.items():
                archive.writestr(f"state/{name}", content)
            for rank, content in enumerate(self.ranks):
                archive.writestr(f"rank/{rank:06d}", content)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> Checkpoint:
        """Returns the checkpoint that a file holds.

        Args:
            content: the file's content.
            where: its path, for messages.

        Raises:
            StoreError: the file is damaged, or of a newer version.
        """
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                header = _header(archive, where)
                names = archive.namelist()
                state = {name[6:]: archive.read(name) for name in names if name.startswith("state/")}
                ranks = [archive.read(f"rank/{rank:06d}") for rank in range(header["ranks"])]
        except _DAMAGES as error:
            raise damaged(where, error) from error
        return cls(
            header["epoch"], header["step"], header["seed"], header["history"], header["fingerprint"], state, ranks
        )


def path_of(store: Any, run_id: str) -> str | None:
    """Returns the path of a run's checkpoint file, None where the store keeps none."""
    folder = store.get_checkpoint_path(run_id)
    return None if folder is None else posixpath.join(folder, store.get_checkpoint_filename())


def read_header(store: Any, run_id: str) -> dict[str, Any] | None:
    """Returns the header of a run's checkpoint without reading the states; None where there is no checkpoint.

    The file is asked for by its name: a listing may not show yet what was written a second ago.

    Raises:
        StoreError: the file is damaged.
    """
    path = path_of(store, run_id)
    if path is None:
        return None
    try:
        with store.open_to_read(path) as file, zipfile.ZipFile(file) as archive:
            return _header(archive, path)
    except FileNotFoundError:
        return None
    except _DAMAGES as error:
        raise damaged(path, error) from error


def _header(archive: zipfile.ZipFile, where: str) -> dict[str, Any]:
    """Returns the header, whose fields are there, of the right types and in their ranges.

    Raises:
        StoreError: it is of another version.
        ValueError: it is no header.
    """
    header: Any = json.loads(archive.read("header.json"))
    if not isinstance(header, dict) or type(header.get("version")) is not int:
        raise ValueError("its header has no version")
    if header["version"] != _VERSION:
        raise StoreError(
            f"{where} is a checkpoint of format {header['version']}, and this version of sparkvod reads format "
            f"{_VERSION}: resume with the sparkvod that wrote it, or pass another run_id"
        )
    for name in ("epoch", "step", "seed", "ranks"):
        if type(header.get(name)) is not int or header[name] < 0:
            raise ValueError(f"{name} must be a whole number from 0, got {header.get(name)!r}")
    history, fingerprint = header.get("history"), header.get("fingerprint")
    if not isinstance(history, list) or not all(isinstance(record, dict) for record in history):
        raise ValueError("history must be a list of records")
    if not isinstance(fingerprint, dict):
        raise ValueError(f"fingerprint must be a dict, got {fingerprint!r}")
    return header


def plain(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a fingerprint as it comes back from JSON."""
    values: dict[str, Any] = json.loads(json.dumps(fingerprint))
    return values


def require_same(found: Mapping[str, Any], expected: Mapping[str, Any], run_id: str, step: int) -> None:
    """Refuses to go on with a run of something else.

    Args:
        found: the fingerprint of the run as it is now.
        expected: the one in the checkpoint.
        run_id: the run's name.
        step: the checkpoint's step; 0, between epochs, leaves more free to change.

    Raises:
        ValueError: they differ; the message says in what.
    """
    changed = differences(found, expected, () if step else FREE_BETWEEN_EPOCHS)
    if changed:
        within = any(changed.get(name) for name in FREE_BETWEEN_EPOCHS)
        hint = f" ({', '.join(FREE_BETWEEN_EPOCHS)} may change between epochs, not in step {step} of one)"
        raise ValueError(
            f"run {run_id!r} has a checkpoint of another training: {'; '.join(changed.values())}. "
            f"The same data, model and Params were expected{hint if within else ''}; pass them, or another run_id (in "
            "a search over Params or folds leave run_id out: each fit then gets a run of its own)"
        )


@contextmanager
def alone(store: Any, run_id: str) -> Iterator[None]:
    """Keeps two fits of this process out of one run at a time, as a search with ``parallelism`` would make them.

    Raises:
        ValueError: another fit is training this run.
    """
    path = path_of(store, run_id)
    with _lock:
        if path is not None and path in _active:
            raise ValueError(
                f"run {run_id!r} is being trained by another fit in this process, a run of its own was expected for "
                "each; in a search over Params or folds leave run_id out"
            )
        _active.add(path)
    try:
        yield
    finally:
        with _lock:
            _active.discard(path)


def damaged(path: str, error: BaseException) -> StoreError:
    """Returns the error to raise for a file that is no checkpoint."""
    return StoreError(
        f"{path} is no whole checkpoint ({error}); delete it to start the run anew, or pass another run_id"
    )


def differences(found: Mapping[str, Any], expected: Mapping[str, Any], free: Collection[str] = ()) -> dict[str, str]:
    """Returns, in words by name, where two fingerprints differ.

    Args:
        found: the one of the run as it is now.
        expected: the one in the checkpoint.
        free: names that may differ.
    """
    return {
        name: f"{name} is {_shown(found.get(name))} and was {_shown(expected.get(name))}"
        for name in sorted({*found, *expected} - {*free})
        if found.get(name) != expected.get(name)
    }


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
