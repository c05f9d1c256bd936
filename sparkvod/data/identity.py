"""When two DataFrames are the same data: proved, or not at all.

A preparation may be used again only when evaluating the DataFrame now would give the rows that it gave then. The proof
has four parts, and where one cannot be had there is no proof and the data are prepared again:

* the plan consists of operators and functions known to be deterministic (``plans``), over files, literals, local data
  and ranges: no random numbers, no clocks, no RDDs, no databases, and no UDFs but those of Spark ML's transformers of
  features (``udfs``);
* Spark says that both plans mean the same, within one driver, and their columns have the same names;
* Spark's configuration is the same;
* the source files have the names, sizes and modification times (or entity tags) that they had before *and* after the
  earlier evaluation, and none was so young that a later change could have the same time.
"""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from sparkvod import log
from sparkvod.data import plans, udfs

_FIELDS = "spark.sql.debug.maxToStringFields"
_MAX_FILES = 10_000
_LOCAL_BYTES = 64 << 20
"""Local data up to which a DataFrame is kept, so that a later one over equal data can be compared to it."""
# A change within the clock's tick of the file system leaves the time as it was.
_TICK_LOCAL, _TICK_REMOTE = 0.05, 2.5

_log = log.get("data")


@dataclass(frozen=True)
class Proof:
    """What identifies the rows that a DataFrame gives.

    Attributes:
        frame: gives the DataFrame, or None when it is gone (one over much local data is not kept alive).
        names: the names of its columns, which Spark's comparison of plans ignores.
        files: source file -> (size, time or tag).
        conf: Spark's configuration.
        plan: the normalised plan, None in Spark Connect or while ``frame`` may vanish.
    """

    frame: Callable[[], Any]
    names: tuple[str, ...]
    files: dict[str, tuple[Any, ...]]
    conf: dict[str, str]
    plan: udfs.Normalised | None

    def difference(self, other: Proof) -> str | None:
        """Returns why other rows may come from the other DataFrame, None when both give the same."""
        if self.names != other.names:
            return "its columns have other names"
        if self.conf != other.conf:
            keys = sorted(key for key in {*self.conf, *other.conf} if self.conf.get(key) != other.conf.get(key))
            return f"Spark's configuration has changed ({', '.join(keys[:3])})"
        if self.files != other.files:
            return "the source files are others or have changed"
        mine, theirs = self.frame(), other.frame()
        if mine is None or theirs is None:
            return "the DataFrame of local data is gone, to which it would have to be compared"
        if mine is theirs:
            return None
        try:
            if self.plan is not None and other.plan is not None:
                same = self.plan.equals(other.plan)
            else:
                same = bool(mine.sameSemantics(theirs))
        except Exception as error:  # another session, or one that was stopped: Spark has no common class for these
            return f"the plans cannot be compared ({str(error)[:200]})"
        return None if same else "the plans differ"

    def still_holds(self) -> bool:
        """Tells whether the source files are what they were when the proof was made."""
        return _stat(list(self.files)) == self.files


def prove(df: Any) -> Proof | None:
    """Returns what identifies the rows of a DataFrame, None when nothing can; the log says why, at level info.

    Args:
        df: a DataFrame, classic or of Spark Connect. No job is run.
    """
    try:
        conf = dict(df.sparkSession.conf.getAll)
        conf.pop(_FIELDS, None)
        plan, rest = _plans(df)
        normalised = udfs.normalise(df)
        # What is cached may be older than the files, and need not stay cached.
        reason = (
            "it reads cached data"
            if "InMemory" in rest
            else plans.why_not(plan, None if normalised is None else normalised.names)
        )
        files = _files(df, plan) if reason is None else {}
    except (udfs.UnknownFunctionError, _UnknownFilesError) as error:
        reason = f"{error} is in its plan" if isinstance(error, udfs.UnknownFunctionError) else str(error)
    except Exception as error:  # whatever an old or restricted session cannot do: then there is no proof
        reason = f"its plan cannot be inspected ({str(error)[:200]})"
    if reason is not None:
        _log.info("the prepared data will not be used again, the identity of the DataFrame is not known: %s", reason)
        return None
    vanishes = plans.has_local_data(plan) and (normalised is None or not _keeps(normalised.plan))
    frame = weakref.ref(df) if vanishes else (lambda: df)
    return Proof(frame, tuple(df.columns), files, conf, None if vanishes else normalised)


def _keeps(plan: Any) -> bool:
    return udfs.local_bytes(plan) <= _LOCAL_BYTES


def _plans(df: Any) -> tuple[str, str]:
    """Returns the text of the analysed plan, and that of the optimised and physical ones, with all their expressions.

    SQL gives them in Spark Connect too.
    """
    session = df.sparkSession
    before = session.conf.get(_FIELDS, None)
    session.conf.set(_FIELDS, "1000000")
    try:
        text = session.sql("EXPLAIN EXTENDED SELECT * FROM {data}", data=df).collect()[0][0]
    finally:
        if before is None:
            session.conf.unset(_FIELDS)
        else:
            session.conf.set(_FIELDS, before)
    analysed, _, rest = str(text).partition("== Analyzed Logical Plan ==")[2].partition("== Optimized Logical Plan ==")
    return analysed.strip(), rest.replace("InMemoryFileIndex", "")


class _UnknownFilesError(Exception):
    """The source files are not known, or cannot be inspected."""


def _files(df: Any, plan: str) -> dict[str, tuple[Any, ...]]:
    """Returns the source files of a DataFrame with their sizes and times."""
    sources = sorted(df.inputFiles())
    if plans.has_files(plan) and not sources:
        raise _UnknownFilesError("its source files are not known")
    files = _stat(sources)
    if files is None:
        raise _UnknownFilesError("a source file is too young, too many are there, or one cannot be inspected")
    return files


def _stat(sources: list[str]) -> dict[str, tuple[Any, ...]] | None:
    """Returns size and time, or tag, of files; None when one cannot be trusted."""
    if len(sources) > _MAX_FILES:
        return None
    found: dict[str, tuple[Any, ...]] = {}
    for source in sources:
        try:
            fs, path = url_to_fs(re.sub(r"^s3[an]://", "s3://", source))
            fs.invalidate_cache()
            info = fs.info(path)
        except (OSError, ImportError, ValueError) as error:
            _log.debug("the source file %s cannot be inspected: %s", source, error)
            return None
        if isinstance(fs, LocalFileSystem):
            if time.time() - info["mtime"] < _TICK_LOCAL:
                return None
            found[source] = (info["size"], info["mtime"], info["ino"])
            continue
        tag = info.get("ETag") or info.get("etag") or info.get("md5Hash")
        changed = info.get("LastModified") or info.get("updated") or info.get("last_modified")
        if tag is None and (changed is None or time.time() - changed.timestamp() < _TICK_REMOTE):
            return None
        found[source] = (info["size"], str(tag), str(changed))
    return found
