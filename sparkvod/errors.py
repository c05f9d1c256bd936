"""Every exception that sparkvod raises, in two families: mistakes of the caller, and lost peers or time-outs.

:func:`require` says which extra a missing optional package is in.

A mistake of the caller is a ``ValueError`` (or ``TypeError``): running again changes nothing.
``HorovodInternalError`` is the family from which a job may go on: a collective failed because a peer was lost, was
late, or sent something else. Names that scripts written for the peer catch are kept.
"""

from __future__ import annotations

import importlib.util


class SparkvodError(Exception):
    """Base of every error that sparkvod raises on its own account."""


class HorovodInternalError(SparkvodError, RuntimeError):
    """A collective failed. The message names the ranks and, where it is known, the host."""


class PeerLostError(HorovodInternalError):
    """A peer died or closed its connection; the message names its rank and host."""


class CollectiveTimeoutError(HorovodInternalError):
    """A collective, or the start of a world, did not end within its deadline."""


class MismatchError(HorovodInternalError):
    """The ranks submitted different dtypes, shapes or operations under one name; the message says who sent what."""


class ShutDownError(HorovodInternalError):
    """The world was shut down while this collective was pending; the message names the rank that left, and why."""


class HostsUpdatedInterrupt(SparkvodError, RuntimeError):
    """The set of hosts changed; ``skip_sync`` tells whether the state needs no synchronisation.

    Args:
        skip_sync: True when nothing was removed and the state of all ranks is still equal.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts changed")
        self.skip_sync = skip_sync

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.skip_sync,)


class NotInitializedError(SparkvodError, ValueError):
    """A call that needs a world came before ``init()`` or after ``shutdown()``."""


class LaunchError(SparkvodError, RuntimeError):
    """A job could not be started: too few slots, dynamic allocation, no session, a start-up deadline."""


class WorkerError(SparkvodError, RuntimeError):
    """A function failed on a worker. ``raise ... from`` carries the worker's own exception when it can be pickled.

    Args:
        rank: rank of the worker whose error came first; of the one that was waited for in vain, where the words of
            those that waited name one.
        host: name of that worker's host.
        kind: class name of the worker's exception.
        message: its text.
        traceback: the worker's own traceback as text.
        lost_peer: True when the cause is a lost or late rank, not the function: running again may help.
        noticed_by: who waited and raised this, where ``rank`` itself has said nothing; empty otherwise.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        kind: str,
        message: str,
        traceback: str,
        lost_peer: bool = False,
        noticed_by: str = "",
    ) -> None:
        what = f"was waited for in vain, as {noticed_by} noticed:" if noticed_by else "raised"
        whose = f"The traceback of {noticed_by}" if noticed_by else "That worker's traceback"
        super().__init__(f"rank {rank} on {host} {what} {kind}: {message}\n\n{whose}:\n{traceback}")
        self.rank, self.host, self.kind, self.message, self.traceback = rank, host, kind, message, traceback
        self.lost_peer, self.noticed_by = lost_peer, noticed_by

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        said = (self.rank, self.host, self.kind, self.message, self.traceback, self.lost_peer, self.noticed_by)
        return type(self), said


class WorkerLostError(WorkerError):
    """A worker's process ended without a result: it was killed, or it left by itself.

    Args:
        rank: rank of that worker, -1 when Spark does not tell which one it was.
        host: name of its host.
        how: how it ended, with exit code or signal.
        output: its last lines of output, empty when they are not known.
    """

    def __init__(self, rank: int, host: str, how: str, output: str = "") -> None:
        tail = f"; its last output:\n{output}" if output else ""
        who = f"rank {rank}" if rank >= 0 else "a rank"
        # Of a worker that was killed Spark says no signal.
        killed = "SIGKILL" in how or "(crashed)" in how
        memory = "; the kernel kills a process so when memory runs out: look for it in dmesg, and see docs/failures.md"
        said = f"{who} on {host} was lost: its process {how} before it had a result{memory if killed else ''}{tail}"
        RuntimeError.__init__(self, said)
        self.rank, self.host, self.kind, self.message, self.traceback = rank, host, "WorkerLost", how, output
        self.lost_peer, self.noticed_by = True, ""

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.rank, self.host, self.message, self.traceback)


class DataError(SparkvodError, ValueError):
    """A DataFrame or data set cannot be trained on as asked: a column, a type, a null, a shape, no rows."""


class StoreError(SparkvodError, OSError):
    """A store path cannot be read or written."""


def require(extra: str, what: str, *modules: str) -> None:
    """Checks, without importing them, that optional packages are installed.

    Args:
        extra: sparkvod's extra that installs them.
        what: what needs them, for the message.
        *modules: names of top-level modules.

    Raises:
        ImportError: some are not; says what to install.
    """
    missing = [module for module in modules if not _is_installed(module)]
    if missing:
        raise ImportError(
            f"{', '.join(missing)} {'was' if len(missing) == 1 else 'were'} not found, which {what} needs; "
            f"pip install 'sparkvod[{extra}]'",
            name=missing[0],
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # an import hook refuses it, or it is half imported
        return False
