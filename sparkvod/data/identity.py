"""When two DataFrames are the same data: proved, or not at all.

A preparation may be used again only when evaluating the DataFrame now would give the rows that it gave then. The proof
has four parts, and where one cannot be had there is no proof and the data are prepared again:

* the plan consists of operators and functions known to be deterministic, over files, literals and ranges (no UDFs, no
  random numbers, no clocks, no RDDs, no databases);
* Spark says that both plans mean the same (``sameSemantics``), within one driver;
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


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text))


_OPERATORS = _words(
    """
    Aggregate Distinct Filter Join LocalRelation Project Range Relation Repartition RepartitionByExpression
    ResolvedHint Sort SubqueryAlias Union View
    """
)
_FUNCTIONS = _words(
    """
    abs acos array asin atan atan2 avg bround cast cbrt ceil ceiling char char_length coalesce concat concat_ws
    contains cos cosh count date_add date_format date_sub date_trunc datediff day dayofmonth dayofweek dayofyear
    decimal element_at endswith exp expm1 floor from_unixtime get gettimestamp greatest hash hour hypot if
    ifnull in isnan isnotnull isnull knownnotnull least length ln log log10 log1p log2 lower ltrim make_date
    make_timestamp max md5 min minute month named_struct nanvl not nullif nvl pmod pow power quarter radians
    regexp_extract regexp_replace replace rint round rtrim second sha1 sha2 sign signum sin sinh size split sqrt
    startswith stddev stddev_pop stddev_samp struct substr substring sum tan tanh to_date to_timestamp
    to_unix_timestamp trim trunc try_add try_cast try_divide upper var_pop var_samp varchar variance weekday
    weekofyear xxhash64 year
    """
)
_FIELDS = "spark.sql.debug.maxToStringFields"
_MAX_FILES = 10_000
# A change within the clock's tick of the file system leaves the time as it was.
_TICK_LOCAL, _TICK_REMOTE = 0.05, 2.5

_log = log.get("data")


@dataclass(frozen=True)
class Proof:
    """What identifies the rows that a DataFrame gives.

    Attributes:
        frame: gives the DataFrame, or None when it is gone (one over local data is not kept alive).
        files: source file -> (size, time or tag).
        conf: Spark's configuration.
    """

    frame: Callable[[], Any]
    files: dict[str, tuple[Any, ...]]
    conf: dict[str, str]

    def equals(self, other: Proof) -> bool:
        """Tells whether both DataFrames give the same rows."""
        if self.files != other.files or self.conf != other.conf:
            return False
        mine, theirs = self.frame(), other.frame()
        if mine is None or theirs is None:
            return False
        if mine is theirs:
            return True
        try:
            return bool(mine.sameSemantics(theirs))
        except Exception as error:  # another session, or one that was stopped: Spark has no common class for these
            _log.debug("the plans cannot be compared: %s", error)
            return False

    def still_holds(self) -> bool:
        """Tells whether the source files are what they were when the proof was made."""
        return _stat(list(self.files)) == self.files


def prove(df: Any) -> Proof | None:
    """Returns what identifies the rows of a DataFrame, None when nothing can.

    Args:
        df: a DataFrame, classic or of Spark Connect. No job is run.
    """
    try:
        conf = dict(df.sparkSession.conf.getAll)
        conf.pop(_FIELDS, None)
        plan, rest = _plans(df)
        # What is cached may be older than the files, and need not stay cached.
        reason = "it reads cached data" if "InMemory" in rest else why_not(plan)
        sources = sorted(df.inputFiles())
    except Exception as error:  # whatever an old or restricted session cannot do: then there is no proof
        _log.debug("the identity of the DataFrame cannot be established: %s", error)
        return None
    if reason is None and "Relation [" in plan.replace("LocalRelation [", "") and not sources:
        reason = "its source files are not known"
    files = _stat(sources) if reason is None else None
    if files is None:
        _log.debug(
            "the identity of the DataFrame cannot be established: %s", reason or "a source file cannot be inspected"
        )
        return None
    local = "LocalRelation" in plan
    return Proof(weakref.ref(df) if local else (lambda: df), files, conf)


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


def why_not(plan: str) -> str | None:
    """Returns why an analysed plan is not known to be deterministic, None when it is.

    Everything unknown counts as not deterministic. A Python UDF is shown as ``name(arguments)#id``.
    """
    _, _, operators = plan.partition("\n")
    for line in operators.splitlines():
        text = re.sub(r"^[\s:+|-]*", "", line)
        operator = re.split(r"[\s(]", text, maxsplit=1)[0]
        if operator not in _OPERATORS:
            return f"operator {operator or line!r}"
        if re.search(r"\)#\d", text):
            return f"a UDF or a column named like one in {operator}"
        for name in re.findall(r"([\w<>$.]+)\(", text):
            if name.lower() not in _FUNCTIONS:
                return f"function {name}"
        if re.search(r"\b(current_\w+|now|localtimestamp|_metadata|_nondeterministic)\b|more fields", text):
            return f"an expression of {operator}"
    return None if operators else "an empty plan"


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
