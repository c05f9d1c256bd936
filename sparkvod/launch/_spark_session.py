"""What is looked at before a session's first job: that it is alive, and that its workers' Python has what we need.

Classic Spark's local workers run ``PYSPARK_PYTHON``, as it was when the session was made, else the ``python3`` on the
path. A script that was started by ``.venv/bin/python train.py`` without more gets the system's, in which a job fails
with pages of Java and Python traces.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sparkvod import config, log
from sparkvod.errors import LaunchError
from sparkvod.launch import _spark_slots

#: What a worker must find before it can say anything itself.
NEEDED = ("sparkvod", "pyarrow")
_ASK = f"import importlib.util as u; print([m for m in {NEEDED} if u.find_spec(m) is None])"
_ASK_SECONDS = 30.0
_MISSING = re.compile(r"ModuleNotFoundError: No module named '((?:sparkvod|pyarrow|torch|numpy)\b[\w.]*)'")
_logger = log.get("launch.spark")


def check_session(spark: Any) -> None:
    """Raises ``LaunchError`` if the session has been stopped, or see :func:`check_workers_python`."""
    require_alive(spark)
    check_workers_python(spark)


def require_alive(spark: Any) -> None:
    """Checks that the session has not been stopped; starts no job.

    Raises:
        LaunchError: it has.
    """
    if is_connect(spark):
        if getattr(spark, "is_stopped", False):
            raise LaunchError(no_session("this one was stopped"))
        return
    try:
        spark.newSession()  # takes milliseconds, and fails where there is no living context
    except Exception as e:  # the class differs between releases, and the text holds the JVM's frames
        raise LaunchError(no_session("this one was stopped")) from e


def is_connect(spark: Any) -> bool:
    """Tells whether the session is one of Spark Connect."""
    return "connect" in type(spark).__module__


def no_session(why: str) -> str:
    """Returns the text of the error for a session that is not there."""
    return f"there is no active Spark session; make one with SparkSession.builder...getOrCreate() first ({why})"


def check_workers_python(spark: Any) -> None:
    """Checks that the Python that the session's workers run has sparkvod and pyarrow; starts no job.

    That can be known before a job where the executors are this host's: another Python than this one is asked, once
    per process. Elsewhere the job's failure tells; see :func:`advising`.

    Raises:
        LaunchError: it lacks one of them.
    """
    if is_connect(spark) or not _spark_slots.is_one_host(_spark_slots.conf_of(spark)):
        return
    given = config.environment().get("PYSPARK_PYTHON", "")
    found = shutil.which(given or "python3")
    if found is None or same_python(found, sys.executable):
        return
    missing = missing_in(found)
    if missing:
        chosen = f"PYSPARK_PYTHON={given}" if given else "the first python3 on PATH, because PYSPARK_PYTHON is unset"
        raise LaunchError(
            f"Spark's workers run {found} ({chosen}), which lacks {' and '.join(missing)}; they must run a Python like "
            f"this one: start with PYSPARK_PYTHON={sys.executable}, or activate its environment"
        )


def same_python(one: str, other: str) -> bool:
    """Tells whether two paths are one interpreter of one environment.

    The interpreter of a virtual environment is a link to the one that it was made from, so the folders count too.
    """
    folders = [os.path.realpath(os.path.dirname(path)) for path in (one, other)]
    return folders[0] == folders[1] and os.path.realpath(one) == os.path.realpath(other)


@functools.cache
def missing_in(python: str) -> tuple[str, ...]:
    """Returns which of the modules that a worker needs an interpreter does not find; none when it does not answer."""
    try:
        asked = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=_ASK_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as e:
        _logger.warning("the workers' Python %s could not be asked for its modules: %s", python, e)
        return ()
    return tuple(re.findall(r"'(\w+)'", asked.stdout))


def missing_module(text: str) -> str | None:
    """Returns the advice for a job that failed because the workers' Python lacks a module; None for other failures."""
    found = _MISSING.search(text)
    return found and (
        f"the workers' Python lacks {found.group(1)}; install sparkvod and what it needs in it, or ship an environment "
        f"to the executors, and name that interpreter in PYSPARK_PYTHON (spark.pyspark.python); this process runs "
        f"{sys.executable}"
    )


@contextmanager
def advising() -> Iterator[None]:
    """Turns the failure of a Spark job in the body, if it is that of a module that workers lack, into advice.

    Raises:
        LaunchError: that was it.
    """
    try:
        yield
    except Exception as e:
        advice = missing_module(str(e))
        if advice is None or isinstance(e, LaunchError):
            raise
        raise LaunchError(f"the Spark job failed: {advice}") from e
