"""How a worker's end by an exception travels to the caller, and which of several ends was the cause of the others."""

from __future__ import annotations

import base64
import json
import re
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import cloudpickle

from sparkvod import log
from sparkvod.errors import (
    CollectiveTimeoutError,
    HorovodInternalError,
    PeerLostError,
    ShutDownError,
    WorkerError,
    WorkerLostError,
)

_OWN_FRAMES = str(Path(__file__).parent)
_TEXT_LIMIT = 64 << 10
_PACKAGES = ("sparkvod", "pyarrow", "torch", "numpy", "fsspec")
_NOTICED = (PeerLostError.__name__, ShutDownError.__name__, CollectiveTimeoutError.__name__)
# What the engine says of a peer whose connection closed without a good-bye.
_LOST = re.compile(
    r"rank (?P<rank>\d+) on (?P<host>\S+) left\b[^\n]*: (?:its process ended|Connection reset|Broken pipe|it left in)"
)
# What the engine, and a launcher's all-gather, say of one rank that was waited for until the time-out; of several
# they name none as the cause.
_LATE = (
    re.compile(
        r"(?:waited \S+ s for|was not submitted by|join was not called by) "
        r"rank (?P<rank>\d+) on (?P<host>[^\s,;]+)(?: \(which waits for [^)]*\))?(?: in |, for which |, which )"
    ),
    re.compile(r"^rank (?P<rank>\d+) on (?P<host>\S+) did not call init\(\) within "),
    re.compile(r"; (?:missing: )?rank (?P<rank>\d+) on (?P<host>\S+): "),  # while the ranks connect
)
_RAISED = re.compile(r"rank \d+ raised (\w+)")


@dataclass(frozen=True)
class Failure:
    """One worker's failure, as plain data.

    Attributes:
        rank: the worker's rank.
        host: name of its host.
        kind: class name of its exception; empty when the process was lost.
        message: the exception's text, or how the process ended.
        traceback: the worker's traceback, or the lost process's last output.
        time: when it happened, seconds since the epoch by that host's clock.
        severity: 0 the function's own error or a lost process, 1 a collective that failed, 2 a peer noticed as lost.
        exception: the pickled exception; empty when it cannot be pickled or is too large to carry.
        noticed_by: the rank and host whose exception this is, where ``rank`` is another, which it waited for.
    """

    rank: int
    host: str
    kind: str
    message: str
    traceback: str
    time: float
    severity: int
    exception: bytes = b""
    noticed_by: str = ""

    @classmethod
    def capture(cls, error: BaseException, rank: int, host: str, limit: int = 1 << 20) -> Failure:
        """Describes ``error``, with the exception itself when that takes at most ``limit`` bytes."""
        return cls(
            rank,
            host,
            type(error).__name__,
            _cut(_message(error)),
            _cut(_format(error)),
            time.time(),
            _severity(error),
            _pickle(error, limit),
        )

    @classmethod
    def lost(cls, rank: int, host: str, how: str, output: str = "") -> Failure:
        """Describes a process that ended without a word."""
        return cls(rank, host, "", how, output, time.time(), 0)

    def to_json(self) -> str:
        """Returns it as one line of JSON."""
        return json.dumps({**asdict(self), "exception": base64.b64encode(self.exception).decode()})

    @classmethod
    def from_json(cls, text: str, trusted: bool) -> Failure:
        """Reads :meth:`to_json`; the pickled exception is kept only when the text came over a trusted channel."""
        fields = json.loads(text)
        fields["exception"] = base64.b64decode(fields["exception"]) if trusted else b""
        return cls(**fields)

    def error(self) -> WorkerError:
        """Returns what to raise, with the worker's own exception as its cause when that came along."""
        if self.kind:
            lost_peer = self.severity == 2 and not _of_a_function(self.message)
            said = (self.kind, self.message, self.traceback, lost_peer, self.noticed_by)
            error = WorkerError(self.rank, self.host, *said)
        else:
            error = WorkerLostError(self.rank, self.host, self.message, self.traceback)
        if self.exception:
            try:
                error.__cause__ = cloudpickle.loads(self.exception)
            except Exception as e:  # its class may exist on the worker only
                log.get("launch").debug("the exception of rank %d cannot be read here: %s", self.rank, e)
        return error


def first_cause(failures: Iterable[Failure]) -> Failure:
    """Returns the failure that caused the others: ranks that only noticed a lost peer come last, else the earliest."""
    return min(failures, key=lambda f: (f.severity, f.time))


def blame(failures: Iterable[Failure]) -> Failure:
    """Returns :func:`first_cause`, or the loss of the rank that its words name, if that rank has said nothing itself.

    Where Spark ends the job before it sees that a rank's process is gone, only those that noticed are heard. A rank
    that stands still says nothing either: it is blamed with the words of who waited for it.
    """
    failures = sorted(failures, key=lambda f: f.time)
    first = first_cause(failures)
    spoken = {failure.rank for failure in failures}
    lost = _lost(first)
    if lost is None or int(lost["rank"]) in spoken:
        return _late(first, failures, spoken)
    how = f"ended, as rank {first.rank} on {first.host} noticed ({first.message}),"
    return Failure(int(lost["rank"]), lost["host"], "", how, "", first.time, 0, first.exception)


def silent_rank(failure: Failure) -> int:
    """Returns the rank whose process ended or stands still, in the words of one that only noticed it; else -1."""
    silent = _lost(failure) or _waited_for(failure)
    return int(silent["rank"]) if silent else -1


def _late(first: Failure, failures: list[Failure], spoken: set[int]) -> Failure:
    """Returns the failure of the one silent rank that others waited for; ``first`` if there is none, or several."""
    if first.severity != 2:
        return first
    late = [(found, f) for f in failures if (found := _waited_for(f)) and int(found["rank"]) not in spoken]
    if len({found["rank"] for found, _ in late}) != 1:
        return first
    found, by = late[0]
    return replace(by, rank=int(found["rank"]), host=found["host"], noticed_by=f"rank {by.rank} on {by.host}")


def _waited_for(failure: Failure) -> re.Match[str] | None:
    if failure.severity != 2 or _RAISED.search(failure.message):
        return None
    found = [match for words in _LATE for match in words.finditer(failure.message)]
    return found[0] if len({match["rank"] for match in found}) == 1 else None


def _lost(failure: Failure) -> re.Match[str] | None:
    if failure.severity != 2 or _RAISED.search(failure.message):
        return None
    return _LOST.search(failure.message)


def _severity(error: BaseException) -> int:
    """A user's ``raise ... from`` around a collective's error is still a collective's error."""
    level, seen = 0, set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, (PeerLostError, ShutDownError, CollectiveTimeoutError)):
            return 2
        if isinstance(link, HorovodInternalError):
            level = 1
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return level


def _of_a_function(message: str) -> bool:
    """Tells whether what a rank noticed was the end of another by an exception, in the words of that rank's good-bye.

    Its own failure says so better, but may be the one that did not arrive.
    """
    kinds = _RAISED.findall(message)
    return bool(kinds) and kinds[-1] not in _NOTICED


def _format(error: BaseException) -> str:
    """Formats the traceback, and those of the errors behind it, without the launcher's own frames on top.

    What the launcher does around a function, and to clean up after it, says nothing about its error.
    """
    described = traceback.TracebackException.from_exception(error)
    links: list[traceback.TracebackException | None] = [described]
    while links:
        link = links.pop()
        if link is None:
            continue
        while len(link.stack) > 1 and link.stack[0].filename.startswith(_OWN_FRAMES):
            del link.stack[0]
        links += [link.__cause__, link.__context__]
    return "".join(described.format())


def _message(error: BaseException) -> str:
    """Returns the error's text; for a package that a rank needs and lacks, with the interpreter that lacks it."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if name not in _PACKAGES:
        return str(error)
    return (
        f"{error}: this rank's Python, {sys.executable}, lacks {name}; install it there, or start with PYSPARK_PYTHON "
        "(spark.pyspark.python) naming an interpreter on this host that has it"
    )


def _cut(text: str) -> str:
    half = _TEXT_LIMIT // 2
    if len(text) <= _TEXT_LIMIT:
        return text
    return f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"


def _pickle(error: BaseException, limit: int) -> bytes:
    """Many exceptions can be pickled but not be read back (their __init__ takes other arguments): try both."""
    try:
        data = cloudpickle.dumps(error)
        if len(data) > limit or type(cloudpickle.loads(data)) is not type(error):
            return b""
    except Exception:  # whatever its __reduce__ does
        return b""
    return data
