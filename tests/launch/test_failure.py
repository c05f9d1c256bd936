from __future__ import annotations

import pickle
import sys
import traceback
from pathlib import Path

import cloudpickle
import pytest

from sparkvod.errors import (
    CollectiveTimeoutError,
    HostsUpdatedInterrupt,
    MismatchError,
    PeerLostError,
    WorkerError,
    WorkerLostError,
)
from sparkvod.launch._spark_worker import Task, TaskFailedError, _run, decode, encode
from sparkvod.launch.failure import Failure, blame, first_cause, silent_rank


def caught(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as e:
        return e


def test_it_survives_json_and_keeps_the_exception_when_trusted() -> None:
    failure = Failure.capture(caught(KeyError("a")), 3, "host")
    assert (failure.rank, failure.host, failure.kind, failure.severity) == (3, "host", "KeyError", 0)
    assert "raise error from cause" in failure.traceback
    assert Failure.from_json(failure.to_json(), trusted=True) == failure
    assert Failure.from_json(failure.to_json(), trusted=False).exception == b""
    error = Failure.from_json(failure.to_json(), trusted=True).error()
    assert isinstance(error, WorkerError)
    assert isinstance(error.__cause__, KeyError)


def test_large_exceptions_and_texts_are_left_out_or_cut() -> None:
    failure = Failure.capture(caught(ValueError("x" * 300_000)), 0, "host", limit=1000)
    assert failure.exception == b""
    assert len(failure.message) < 70_000
    assert "characters" in failure.message


def test_it_is_found_in_a_text_of_sparks() -> None:
    failures = [Failure.capture(caught(ValueError(f"of {r}")), r, "host") for r in range(2)]
    text = f"Job aborted\n\tat x.y\n{encode(failures[0])}\n more {encode(failures[1])} and {encode(failures[0])}"
    assert decode(text) == failures
    assert decode("nothing of ours [sparkvod failure") == []


@pytest.mark.parametrize(
    ("error", "severity"),
    [
        (ValueError("x"), 0),
        (MismatchError("x"), 1),
        (PeerLostError("x"), 2),
        (CollectiveTimeoutError("x"), 2),
        (caught(RuntimeError("while saving"), PeerLostError("x")), 2),
    ],
)
def test_what_was_only_noticed_weighs_less(error: BaseException, severity: int) -> None:
    assert Failure.capture(error, 0, "host").severity == severity


def test_the_first_cause_is_the_heaviest_then_the_earliest() -> None:
    def failure(rank: int, severity: int, time: float) -> Failure:
        return Failure(rank, "host", "E", "", "", time, severity)

    failures = [failure(0, 2, 1.0), failure(1, 1, 2.0), failure(2, 0, 4.0), failure(3, 0, 3.0)]
    assert first_cause(failures).rank == 3
    assert first_cause(failures[:2]).rank == 1


def test_a_killed_process_is_told_of_memory() -> None:
    spark = "ended without a word (Spark: Python worker exited unexpectedly (crashed))"
    for how in ("was killed by SIGKILL (exit code -9)", spark):
        assert "when memory runs out" in str(WorkerLostError(1, "host", how))
    assert "memory" not in str(WorkerLostError(1, "host", "ended with exit code 3"))


def test_the_errors_can_be_pickled() -> None:
    for error in (
        WorkerError(1, "host", "ValueError", "text", "the traceback", True),
        WorkerLostError(1, "host", "ended with exit code 3", "last words"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert (str(again), again.__dict__) == (str(error), error.__dict__)
    assert pickle.loads(pickle.dumps(HostsUpdatedInterrupt(True))).skip_sync is True


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (PeerLostError("rank 1 on there was lost"), True),
        (CollectiveTimeoutError("rank 1 had not submitted x"), True),
        (PeerLostError("rank 2 raised PeerLostError: rank 1 on there was lost"), True),
        (PeerLostError("rank 1 raised ValueError: mine"), False),
        (PeerLostError("rank 2 raised PeerLostError: rank 1 raised ValueError: mine"), False),
        (MismatchError("rank 1 sent float32 [2], rank 0 sent float32 [3]"), False),
        (ValueError("mine"), False),
    ],
)
def test_only_a_silent_rank_is_worth_running_again(error: Exception, lost: bool) -> None:
    assert Failure.capture(error, 0, "here").error().lost_peer is lost


def test_the_launchers_frames_are_left_out_of_the_errors_behind_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def users() -> None:
        raise KeyError("first")

    space: dict[str, object] = {"users": users}
    exec(compile("def ours():\n    users()\n", "/the/launcher/cleanup.py", "exec"), space)
    monkeypatch.setattr("sparkvod.launch.failure._OWN_FRAMES", "/the/launcher")
    try:
        space["ours"]()  # type: ignore[operator]
    except KeyError as first:
        told = Failure.capture(caught(ValueError("second"), strip_to(first, "/the/launcher")), 0, "host").traceback
    assert all(word in told for word in ("first", "second", "users"))
    assert "cleanup.py" not in told


def strip_to(error: BaseException, folder: str) -> BaseException:
    """As an error that was caught in a launcher's file: its frames begin there."""
    top = error.__traceback__
    while top is not None and not top.tb_frame.f_code.co_filename.startswith(folder):
        top = top.tb_next
    return error.with_traceback(top)


@pytest.mark.parametrize("name", ["torch", "pyarrow.lib"])
def test_a_package_that_a_rank_lacks_is_told_with_its_python(name: str) -> None:
    message = Failure.capture(ModuleNotFoundError(f"No module named '{name}'", name=name), 0, "host").message
    assert f"this rank's Python, {sys.executable}, lacks {name.partition('.')[0]}; install it there" in message
    users = Failure.capture(ModuleNotFoundError("No module named 'mine'", name="mine"), 0, "host")
    assert users.message == "No module named 'mine'"


def test_what_spark_logs_of_a_task_ends_where_it_was_raised(tmp_path: Path) -> None:
    class Context:
        def partitionId(self) -> int:  # noqa: N802 - Spark's name
            return 0

    task = Task(cloudpickle.dumps((int, ("x",), {})), mailbox=str(tmp_path), private=True)
    with pytest.raises(TaskFailedError, match="ValueError: invalid literal") as failed:
        _run(task, Context(), [0], 0, 1)  # type: ignore[arg-type]
    lines = [frame.line or "" for frame in traceback.extract_tb(failed.value.__traceback__)]
    assert lines[-1].startswith("raise _to_spark(")
    assert not [line for line in lines if "close()" in line]


LEFT = "rank 3 on south left during allreduce of 'a: b': "


def noticed(rank: int, message: str) -> Failure:
    return Failure.capture(PeerLostError(message), rank, "north")


@pytest.mark.parametrize(
    "how", ["its process ended", "its process ended or its host closed the connection", "Connection reset by peer"]
)
def test_a_lost_process_is_blamed_and_not_the_rank_that_noticed(how: str) -> None:
    failures = [noticed(0, LEFT + how), noticed(1, LEFT + how)]
    assert silent_rank(failures[0]) == 3
    error = blame(failures).error()
    assert isinstance(error, WorkerLostError)
    assert (error.rank, error.host, error.lost_peer) == (3, "south", True)
    assert str(error).startswith("rank 3 on south was lost: its process ended, as rank 0 on north noticed (rank 3 on")
    assert isinstance(error.__cause__, PeerLostError)


def test_others_are_blamed_as_they_say() -> None:
    own = Failure.capture(ValueError("x"), 3, "south")
    assert blame([noticed(0, LEFT + "its process ended"), own]) == own
    for message in (LEFT + "rank 3 raised OSError: its process ended", "x"):
        failures = [noticed(0, message)]
        assert blame(failures) == failures[0]
        assert silent_rank(failures[0]) == -1
    spoken = [noticed(0, LEFT + "its process ended"), noticed(3, "rank 2 on south left during x: rank 2 raised E: y")]
    assert blame(spoken) == spoken[0]


def waited(rank: int, message: str) -> Failure:
    return Failure.capture(CollectiveTimeoutError(message), rank, "north")


@pytest.mark.parametrize(
    "message",
    [
        "rank 0 on north waited 2 s for rank 3 on south in allreduce of 'a: b'; it is stopped or far behind",
        "rank 0 on north waited 2 s for rank 3 on south (which waits for rank 1 on north) in allreduce of 'a'; it is",
        "'a' (allreduce) was not submitted by rank 3 on south, for which ranks 0,1 have waited 2 s (limit: 2 s)",
        "'a' was not submitted by rank 3 on south, for which rank 0 has waited 2 s; 'b' was not submitted by rank 3 "
        "on south, for which rank 0 has waited 2 s",
        "join was not called by rank 3 on south, which has submitted nothing else either",
        "rank 0 could not connect to every rank within SPARKVOD_START_TIMEOUT; missing: rank 3 on south: it has not "
        "connected",
    ],
)
def test_a_rank_that_stands_still_is_blamed_with_the_words_of_who_waited(message: str) -> None:
    failures = [noticed(1, "rank 0 on north left"), waited(0, message)]
    assert silent_rank(failures[1]) == 3
    error = pickle.loads(pickle.dumps(blame(failures).error()))
    assert type(error) is WorkerError
    assert (error.rank, error.host, error.kind, error.lost_peer) == (3, "south", "CollectiveTimeoutError", True)
    said = "rank 3 on south was waited for in vain, as rank 0 on north noticed: CollectiveTimeoutError: "
    assert str(error).startswith(said + message)
    assert "The traceback of rank 0 on north:" in str(error)
    own = Failure.capture(PeerLostError("x"), 3, "south")
    assert blame([*failures, own]) == failures[0]


@pytest.mark.parametrize(
    "message",
    [
        "rank 0 on north waited 2 s for rank 2 on south, rank 3 on south in allreduce of 'a'; it is stopped",
        "'a' was not submitted by rank 2 on south, rank 3 on south, for which rank 0 has waited 2 s",
        "rank 0 could not connect to every rank within SPARKVOD_START_TIMEOUT; missing: rank 2 on south: it has not "
        "connected; rank 3 on south: cannot connect; because x",
        "'a' was not submitted by rank 3 on south, for which rank 0 has waited 2 s; 'b' was not submitted by rank 2 "
        "on south, for which rank 0 has waited 2 s",
    ],
)
def test_of_several_that_stand_still_none_is_blamed(message: str) -> None:
    failures = [waited(0, message)]
    assert silent_rank(failures[0]) == -1
    assert blame(failures) == failures[0]
    one = "rank 0 on north waited 2 s for rank 2 on south in x; it is stopped"
    two = [waited(0, one), waited(1, one.replace("rank 2", "rank 3"))]
    assert blame(two) == two[0]
