"""What is looked at before a session's first job, without one: stand-ins for sessions and interpreters."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sparkvod.errors import LaunchError
from sparkvod.launch import _spark_session
from sparkvod.launch._spark_session import advising, check_session, check_workers_python, missing_in, same_python


class Session:
    """A classic session, as far as the checks ask it."""

    def __init__(self, master: str, stopped: bool = False) -> None:
        self.conf, self.stopped = {"spark.master": master}, stopped

    def newSession(self) -> Session:  # noqa: N802 - Spark's name
        if self.stopped:
            raise AssertionError
        return self


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH, with a python3 that has no packages; PYSPARK_PYTHON is unset."""
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\ncd /\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    return tmp_path


@pytest.mark.parametrize("master", ["local", "local[4]", "local-cluster[1,2,512]"])
def test_workers_that_lack_the_package_are_told_of_at_once(path: Path, master: str) -> None:
    said = rf"workers run {path}/python3 .*which lacks sparkvod and pyarrow.*PYSPARK_PYTHON={sys.executable}"
    with pytest.raises(LaunchError, match=said) as caught:
        check_workers_python(Session(master))
    assert "\n" not in str(caught.value)
    began = time.monotonic()
    with pytest.raises(LaunchError):
        check_session(Session(master))
    assert time.monotonic() - began < 0.05, "it was asked a second time"


def test_a_python_that_was_named_is_asked_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path / "python3").rename(path / "other")
    monkeypatch.setenv("PYSPARK_PYTHON", "other")
    with pytest.raises(LaunchError, match=r"workers run .*/other \(PYSPARK_PYTHON=other\), which lacks"):
        check_workers_python(Session("local[2]"))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    check_workers_python(Session("local[2]"))


def test_on_a_cluster_nothing_is_asked(path: Path) -> None:
    check_workers_python(Session("yarn"))
    check_workers_python(Session("spark://there:7077"))


def test_one_interpreter_in_two_environments_is_two(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "python").symlink_to(sys.executable)
    (tmp_path / "a" / "python3").symlink_to("python")
    assert same_python(str(tmp_path / "a" / "python"), str(tmp_path / "a" / "python3"))
    assert not same_python(str(tmp_path / "a" / "python"), str(tmp_path / "b" / "python"))


def test_an_interpreter_that_does_not_answer_is_not_judged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (path / "broken").write_text("#!/bin/sh\nexit 3\n")
    (path / "broken").chmod(0o755)
    assert missing_in(str(path / "broken")) == ()
    assert "could not be asked" in caplog.text


def test_this_environment_has_what_is_needed() -> None:
    asked = subprocess.run(
        [sys.executable, "-c", _spark_session._ASK], capture_output=True, text=True, timeout=60, check=True
    )
    assert asked.stdout.strip() == "[]"


def test_a_stopped_session_is_told() -> None:
    with pytest.raises(LaunchError, match=r"no active Spark session; make one .*this one was stopped"):
        check_session(Session("local[2]", stopped=True))


@pytest.mark.parametrize("module", ["sparkvod", "sparkvod.data", "pyarrow", "torch"])
def test_a_jobs_failure_for_want_of_a_module_is_made_advice(module: str) -> None:
    error: Any = RuntimeError(f"Job aborted\n\tat a.b\n  ModuleNotFoundError: No module named '{module}'\n\tat c.d")
    with pytest.raises(LaunchError, match=rf"workers' Python lacks {module};.*PYSPARK_PYTHON") as caught, advising():
        raise error
    assert caught.value.__cause__ is error


def test_other_failures_are_left_alone() -> None:
    for error in (ValueError("x"), RuntimeError("ModuleNotFoundError: No module named 'mine'")):
        with pytest.raises(type(error)) as caught, advising():
            raise error
        assert caught.value is error
