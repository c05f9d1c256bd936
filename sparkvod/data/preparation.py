"""DataFrame -> Parquet in the store, in one pass over the rows, or an error and nothing left behind."""

from __future__ import annotations

import json
import posixpath
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from sparkvod import log
from sparkvod.data import identity
from sparkvod.data.claims import CLAIM, claim, remove, renew, sweep
from sparkvod.data.dataset import PreparedData, compare, read_manifest, write_manifest
from sparkvod.data.ranges import Range, merged
from sparkvod.data.request import Request, check
from sparkvod.data.schema import DECODE, quoted
from sparkvod.data.store import FilesystemStore
from sparkvod.data.writer import WritePlan, make_task
from sparkvod.errors import DataError, StoreError

_PARTITIONS = 128
_DAMAGED_SOURCE = re.compile(r"\[(FAILED_READ_FILE[.\w]*)\] Encountered error while reading file (\S+?)\.\s")
_AFTER_TRACE = re.compile(r"\n+ ?SQLSTATE: |\n+JVM stacktrace")
"""What Spark's message of a failing Python function may have behind the traceback; Spark Connect adds the first."""
_log = log.get("data")


@dataclass(eq=False)
class _Entry:
    """A preparation that this driver made: what it was made from, and how many use it."""

    prefix: str
    request: Request
    proof: identity.Proof | None
    prepared: PreparedData
    store: FilesystemStore
    users: int = 1


_entries: list[_Entry] = []
_lock = threading.Lock()


def prepare(
    df: Any,
    store: FilesystemStore,
    *,
    label_cols: Sequence[str],
    feature_cols: Sequence[str] | None = None,
    sample_weight_col: str | None = None,
    validation: float | str | None = None,
    num_proc: int = 1,
    partitions_per_process: int = 10,
    seed: int | None = 0,
    verbose: int = 1,
    text: bool = False,
) -> PreparedData:
    """Writes a DataFrame's rows to the store as Parquet that readers can deal to ranks.

    Each row is evaluated once. An identical earlier preparation of this driver is taken instead when it is proved
    (``sparkvod.data.identity``) that evaluating the DataFrame again would give the same rows. Call :func:`release`
    when the data are no longer read: data that can never be used again are deleted by the next preparation.

    Args:
        df: the DataFrame, classic or of Spark Connect.
        store: where to write; the executors must reach it.
        label_cols: columns to predict.
        feature_cols: columns to predict from, None for all others.
        sample_weight_col: column of sample weights, none of them negative.
        validation: fraction [0, 1) of the rows for validation (chosen by ``seed`` and position), or the name of a
            boolean or whole-number column that is true or above 0 in rows for validation; that column is not written.
        num_proc: number of ranks.
        partitions_per_process: how many partitions a rank may have when there are so many. The data keep the
            DataFrame's own partitions, but at most ``num_proc * partitions_per_process`` of them, rounded up to a
            power of two and not less than 128: it is this bound, and not the number of ranks, on which the layout of
            the data and so the order of samples depend. More of them than the DataFrame has are never made: a
            partition is cut into at least 16 row groups instead, and ranks share those.
        seed: decides which rows a fraction takes.
        verbose: 0: log no progress.
        text: whether features may be text.

    Raises:
        DataError: a column is missing or cannot become a tensor; nulls, NaN, vectors of unequal length, negative
            weights; no rows for training or for validation.
        StoreError: the store cannot be written by the driver or by the executors, or they do not share it, as with
            ``memory://``.
        ValueError: ``num_proc`` or ``partitions_per_process`` is less than 1.
    """
    for name, value in (("num_proc", num_proc), ("partitions_per_process", partitions_per_process)):
        if value < 1:
            raise ValueError(f"{name}={value} was found, at least 1 was expected")
    request = check(df, label_cols, feature_cols, sample_weight_col, validation, seed, text)
    proof = identity.prove(df)
    earlier = _earlier(store, request, proof)
    if earlier is not None:
        _log.info("the data were prepared before as %s and are used again", earlier.train.path)
        return earlier
    store.require_shared("prepare")
    store.check_writable()
    _recycle(store)
    began = time.monotonic()
    idx = claim(store)
    try:
        prepared = _write(df, store, request, idx, _partitions(num_proc * partitions_per_process))
    except BaseException:
        remove(store, idx)
        raise
    if proof is not None and not proof.still_holds():
        proof = None
    with _lock:
        _entries.append(_Entry(store.get_train_data_path(), request, proof, prepared, store))
    if verbose:
        val = prepared.val.rows if prepared.val else 0
        _log.info(
            "%d rows for training and %d for validation were prepared in %.1f s as %s",
            prepared.train.rows,
            val,
            time.monotonic() - began,
            prepared.train.path,
        )
    return prepared


def release(prepared: PreparedData) -> None:
    """Says that one user of prepared data is done with them; see :func:`prepare`. Others' data are ignored."""
    with _lock:
        released = [entry for entry in _entries if entry.prepared.train.path == prepared.train.path]
        for entry in released:
            entry.users = max(0, entry.users - 1)
    for entry in released:
        if entry.prepared.idx is not None:
            renew(entry.store, entry.prepared.idx)


def clean(store: FilesystemStore, older_than: float | timedelta = 7 * 86400.0) -> list[int]:
    """Deletes the prepared data sets that ended or crashed drivers have left in a store, whether finished or not.

    A data set goes when it was last prepared, used again or released longer ago than ``older_than``, unless the driver
    that did so is a living process of this host; this driver's own go when they are released. Of a driver on another
    host only the age is known, and a whole ``fit`` counts as one use: choose an age above that of the longest one.
    Directories that :func:`prepare` has not made, and everything below ``runs``, are left alone.

    Args:
        store: the store.
        older_than: the age, in seconds or as a ``timedelta``; 7 days by default.

    Returns:
        The numbers of the data sets that were deleted.

    Raises:
        ValueError: ``older_than`` is negative.
    """
    age = older_than.total_seconds() if isinstance(older_than, timedelta) else float(older_than)
    if not age >= 0:
        raise ValueError(f"older_than={older_than!r} was found, a number of seconds of at least 0 was expected")

    def spare(idx: int) -> bool:
        """Forgets this driver's data set, unless it is in use or still being written."""
        with _lock:
            for entry in _entries:
                if (entry.prefix, entry.prepared.idx) == (store.get_train_data_path(), idx) and entry.users == 0:
                    _entries.remove(entry)
                    return True
        return False

    return sweep(store, age, spare)


def _partitions(wanted: int) -> int:
    """Returns how many partitions at most: a power of two, which rarely changes with the number of ranks."""
    return max(_PARTITIONS, 1 << (wanted - 1).bit_length())


def _earlier(store: FilesystemStore, request: Request, proof: identity.Proof | None) -> PreparedData | None:
    """Returns an earlier preparation that is provably the same and still complete; the log says why there is none."""
    if proof is None:
        return None
    with _lock:
        entries = [entry for entry in _entries if entry.prefix == store.get_train_data_path()]
    for entry in reversed(entries):
        reason = _difference(entry, request, proof)
        if reason is None:
            there = None if entry.prepared.idx is None else read_manifest(store, entry.prepared.idx)
            if there is not None and there.fingerprint == entry.prepared.fingerprint and _use(entry):
                return replace(there, reused=True)
            reason = "it was deleted or changed"
            _forget(entry)
        _log.info("%s is not used again: %s", entry.prepared.train.path, reason)
    return None


def _difference(entry: _Entry, request: Request, proof: identity.Proof) -> str | None:
    if entry.request != request:
        return "other columns, another validation or another seed are asked for"
    if entry.proof is None:
        return "the identity of its DataFrame is not known, or its sources changed while it was prepared"
    return entry.proof.difference(proof)


def _use(entry: _Entry) -> bool:
    """Counts one more user, if the entry was not recycled meanwhile."""
    with _lock:
        if entry not in _entries:
            return False
        entry.users += 1
    if entry.prepared.idx is not None:
        renew(entry.store, entry.prepared.idx)
    return True


def _forget(entry: _Entry) -> None:
    with _lock:
        if entry in _entries:
            _entries.remove(entry)


def _recycle(store: FilesystemStore) -> None:
    """Deletes what this driver prepared in the store, that nobody uses and that can never be used again."""
    with _lock:
        gone = [e for e in _entries if e.prefix == store.get_train_data_path() and e.users == 0 and e.proof is None]
        for entry in gone:
            _entries.remove(entry)
    for entry in gone:
        if entry.prepared.idx is not None:
            remove(entry.store, entry.prepared.idx)


def _write(df: Any, store: FilesystemStore, request: Request, idx: int, partitions: int) -> PreparedData:
    """Runs the one job, checks what the tasks report, and commits."""
    train_path, val_path = store.get_train_data_path(idx), store.get_val_data_path(idx)
    plan = WritePlan(
        store,
        train_path,
        val_path,
        request.columns,
        request.weight,
        request.split,
        request.fraction,
        request.seed,
        request.labels,
    )
    if request.split is not None or request.fraction:
        store.make_directory(val_path)
    with _naming_sources():
        rows = _select(df, request).coalesce(partitions).mapInArrow(make_task(plan), "report string").collect()
    reports = sorted((json.loads(row[0]) for row in rows), key=lambda report: report["partition"])
    columns = _judge(reports, request, store)
    ranges = merged(*({n: Range.from_json(v) for n, v in report["ranges"].items()} for report in reports))
    files = {part: [entry for report in reports for entry in report[part]] for part in ("train", "val")}
    _clean(store, {train_path: files["train"], val_path: files["val"]})
    write_manifest(
        store,
        train_path,
        {
            "idx": idx,
            "columns": [column.to_json() for column in columns],
            "ranges": {name: found.to_json() for name, found in ranges.items()},
            "train": files["train"],
            "val": files["val"] or None,
        },
    )
    prepared = read_manifest(store, idx)
    if prepared is None:
        raise StoreError(
            f"the files just written to {train_path} were changed by somebody else; use a store of your own"
        )
    return prepared


@contextmanager
def _naming_sources() -> Iterator[None]:
    """Raises an error of ours where a file or a Python function fails that the DataFrame is made from."""
    from pyspark.errors import PythonException

    try:
        yield
    except Exception as error:
        text = str(error)
        if damaged := _DAMAGED_SOURCE.search(text):
            raise DataError(
                f"Spark cannot read the DataFrame's source file {damaged[2]} ({damaged[1]}): it may be gone, empty, "
                "cut off or damaged; write it again, or delete it"
            ) from error
        if not isinstance(error, PythonException):
            raise
        at = text.find("Traceback (most recent call last)")
        trace = _AFTER_TRACE.split(text[max(at, 0) :])[0].strip()
        if "/sparkvod/data/" in trace:  # ours, whose own words say what is wrong
            raise
        raise DataError(
            "a Python function in the DataFrame's plan (a UDF, mapInPandas or the like) failed while fit evaluated it: "
            f"{trace.splitlines()[-1]}. Its traceback in Spark's worker:\n{trace}"
        ) from error


def _select(df: Any, request: Request) -> Any:
    """Returns the DataFrame of the columns to write, ML vectors as arrays, and the split column last.

    They are known by their places: ``mapInArrow`` looks columns up by name, and takes a dot in one for a field.
    """
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F

    chosen = []
    for place, column in enumerate(request.columns):
        value = F.col(quoted(column.name))
        # vector_to_array fails on a null without saying where; so nulls go round it, to be counted.
        chosen.append(
            (F.when(value.isNotNull(), vector_to_array(value)) if column.is_ml_vector else value).alias(f"c{place}")
        )
    if request.split is not None and request.split not in [column.name for column in request.columns]:
        chosen.append(F.col(quoted(request.split)).alias("split"))
    return df.select(*chosen)


def _judge(reports: list[dict[str, Any]], request: Request, store: FilesystemStore) -> list[Any]:
    """Returns the columns with their widths, or raises what the reports amount to."""
    for report in reports:
        if report["error"]:
            raise StoreError(
                f"the executors cannot write to the store {store.prefix_path!r} ({report['error']}), a path that the "
                "driver and all executors may write to was expected; pass such a one to Store.create()"
            )
    problems: dict[str, Counter[str]] = {}
    widths: dict[str, Counter[int]] = {}
    for report in reports:
        for column, kinds in report["problems"].items():
            problems.setdefault(column, Counter()).update(kinds)
        for column, found in report["widths"].items():
            widths.setdefault(column, Counter()).update({int(width): rows for width, rows in found})
    total = sum(report["rows"] for report in reports)
    infinite = sum((Counter(report["infinite"]) for report in reports), Counter())
    for column, rows in sorted(infinite.items()):
        _log.warning(
            "column %r has infinite values in %d of %d rows: a loss of them is infinite or NaN; replace them, or drop "
            "these rows",
            column,
            rows,
            total,
        )
    if problems:
        found = "; ".join(
            f"column {column!r} has "
            + " and ".join(f"{kind} in {rows} of {total} rows" for kind, rows in sorted(kinds.items()))
            for column, kinds in problems.items()
        )
        is_text = any("UTF-8" in kind for kinds in problems.values() for kind in kinds)
        cure = DECODE if is_text else "fill them (na.fill, Imputer) or drop these rows (na.drop)"
        raise DataError(f"{found}: {cure}")
    if total == 0:
        raise DataError(
            "the DataFrame has no rows, at least one was expected; check the filters and joins that lead to it"
        )
    for column, sizes in widths.items():
        if len(sizes) > 1:
            text = ", ".join(f"{width} in {rows} rows" for width, rows in sizes.most_common(5))
            raise DataError(
                f"the vectors of column {column!r} have {len(sizes)} different sizes ({text}), one size was "
                "expected; pad or cut them to one, or drop these rows"
            )
        if 0 in sizes:
            raise DataError(
                f"the vectors of column {column!r} are empty, at least one element was expected; leave it out"
            )
    trained = sum(rows for report in reports for entry in report["train"] for rows, _ in entry["groups"])
    if trained == 0:
        raise DataError(
            f"all {total} rows are for validation, some for training were expected; correct the validation column"
        )
    if (request.split is not None or request.fraction) and trained == total:
        how = f"column {request.split!r}" if request.split is not None else f"fraction {request.fraction:g}"
        raise DataError(
            f"the validation {how} leaves 0 of {total} rows for validation, at least one was expected; mark some "
            "rows, take a larger fraction, or train without validation"
        )
    return [c.with_width(next(iter(widths[c.name]))) if c.kind == "vector" else c for c in request.columns]


def _clean(store: FilesystemStore, wanted: dict[str, list[dict[str, Any]]]) -> None:
    """Deletes what tasks left that were repeated, and makes sure that the driver sees what the executors wrote."""
    for path, files in wanted.items():
        strangers, absent = compare(store, path, files)
        if absent:
            raise StoreError(
                f"the executors wrote {len(files)} files to {path}, the driver sees {len(files) - len(absent)} of "
                "them; a path that all machines share was expected: pass one to Store.create()"
            )
        for name in strangers:
            if name != CLAIM:
                store.delete_file(posixpath.join(path, name))
