from __future__ import annotations

import io
import os
import re
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sparkvod
from sparkvod.errors import LaunchError, PeerLostError, WorkerError, WorkerLostError
from sparkvod.launch import _spark_worker, context
from sparkvod.launch import spark as launch_spark
from sparkvod.launch._spark_call import without_idle_timeout
from sparkvod.launch._spark_job import Job
from sparkvod.launch.failure import Failure
from sparkvod.launch.launcher import Launcher
from sparkvod.launch.output import LinePrinter
from sparkvod.launch.spark import SparkLauncher, run
from sparkvod.observe import mailbox
from tests.contracts.launcher import LauncherContract, my_rank, raise_on

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("no_leaks")]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary directories are made, so that a test sees what is left there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


class TestSparkLauncher(LauncherContract):
    @pytest.fixture(autouse=True)
    def _session(self, spark: Any) -> None:
        self.spark = spark

    def make(self, num_proc: int, **options: Any) -> Launcher:
        return SparkLauncher(num_proc, **options)


def test_it_is_the_packages_run(spark: Any) -> None:
    assert sparkvod.run is run


def test_the_default_is_every_slot(spark: Any) -> None:
    assert SparkLauncher().num_processes() == 4


def test_more_ranks_than_slots_are_refused_before_submission(spark: Any) -> None:
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"5 ranks were asked for.* slots for 4 tasks .*local\[4\].*local\[5\]"):
        run(my_rank, num_proc=5)
    with pytest.raises(LaunchError, match="5 ranks"):
        SparkLauncher(5).num_processes()
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("num_proc", [0, -2])
def test_no_ranks_are_refused(spark: Any, num_proc: int) -> None:
    with pytest.raises(ValueError, match=f"num_proc={num_proc} was found, at least 1 rank was expected"):
        run(my_rank, num_proc=num_proc)


def test_a_missing_session_is_told(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def active() -> Any:
        raise RuntimeError("none")

    monkeypatch.setattr("pyspark.sql.SparkSession.active", active)
    with pytest.raises(LaunchError, match="no active Spark session; make one"):
        run(my_rank)


def test_a_session_is_found_from_any_thread(spark: Any) -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run(my_rank, num_proc=1)))
    thread.start()
    thread.join(60)
    assert results == [[0]]


def test_a_failing_rank_is_told_within_three_seconds(spark: Any) -> None:
    run(my_rank, num_proc=2)
    began = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 on .* raised ValueError: boom"):
        run(raise_on, (1, ValueError("boom")), num_proc=2)
    assert time.monotonic() - began < 3

    def fn() -> None:
        if my_rank() == 0:
            raise ValueError("boom")
        context.current().allgather(b"never complete")  # type: ignore[union-attr]

    began = time.monotonic()
    with pytest.raises(WorkerError, match="rank 0 on .* raised ValueError: boom"):
        run(fn, num_proc=2)
    # The slots of the run before are given back by Spark after two seconds, when it has killed the sleeper.
    assert time.monotonic() - began < 8


def test_a_users_error_is_not_tried_again(spark: Any, tmp_path: Path) -> None:
    def fn() -> None:
        with open(tmp_path / f"{my_rank()}", "a") as file:
            file.write("x")
        raise ValueError("once")

    with pytest.raises(WorkerError):
        run(fn, num_proc=2)
    time.sleep(0.5)
    assert (tmp_path / "0").read_text() + (tmp_path / "1").read_text() in ("xx", "x")


def test_tasks_that_cannot_start_are_interrupted_with_a_reason(
    spark: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr("sparkvod.launch._spark_job.REPORT_SECONDS", 0.3)

    def slow(batches: Any) -> Any:
        tempfile.mkstemp(dir=tmp_path)
        time.sleep(8)
        yield from batches

    other = threading.Thread(target=lambda: spark.range(0, 4, 1, 4).mapInArrow(slow, "id long").collect())
    other.start()
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"0 of 2 tasks had started after 1 s .*interrupted.*raise start_timeout"):
        run(my_rank, num_proc=2, start_timeout=1)
    assert time.monotonic() - began < 5
    # Spark counts running tasks anew every 100 ms, and where nothing happens any more at the next heartbeat.
    report = r"0 of 2 ranks have a slot; Spark reports 1 executors with 4 slots, \d tasks running: waiting for 1 s more"
    assert re.search(report, caplog.text)
    other.join(60)  # it was not interrupted with it
    assert run(my_rank, num_proc=2) == [0, 1]


def test_two_runs_at_once_do_not_mix(spark: Any, temporary: Path) -> None:
    outcomes: dict[str, Any] = {}

    def go(name: str, fail: bool) -> None:
        events: list[dict[str, Any]] = []

        def fn() -> str:
            mailbox.current().post("mark", run=name)
            time.sleep(0.5)
            if fail and my_rank() == 1:
                raise ValueError(f"of {name}")
            time.sleep(1)
            return name

        try:
            outcomes[name] = run(fn, num_proc=2, on_event=events.append)
        except WorkerError as e:
            outcomes[name] = str(e.message)
        outcomes[f"{name} events"] = {event["run"] for event in events}

    threads = [threading.Thread(target=go, args=(name, name == "b")) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert outcomes == {"a": ["a", "a"], "b": "of b", "a events": {"a"}, "b events": {"b"}}


def start_and_end(seconds: float) -> tuple[float, float]:
    """Returns when this rank ran."""
    began = time.time()
    context.current().allgather(b"")  # type: ignore[union-attr]
    time.sleep(seconds)
    return began, time.time()


def test_runs_that_do_not_fit_together_queue(spark: Any) -> None:
    outcomes: list[list[tuple[float, float]]] = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(run(start_and_end, (0.5,), num_proc=3, verbose=0)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert [len(ranks) for ranks in outcomes] == [3, 3, 3]
    spans = sorted((min(began for began, _ in ranks), max(ended for _, ended in ranks)) for ranks in outcomes)
    for (_, ended), (began, _) in zip(spans, spans[1:], strict=False):
        assert began > ended - 0.2, "ranks of two runs held slots that both waited for"


def test_a_run_that_waits_too_long_in_the_queue_is_told_and_the_other_goes_on(spark: Any) -> None:
    outcome: list[list[tuple[float, float]]] = []
    first = threading.Thread(target=lambda: outcome.append(run(start_and_end, (6.0,), num_proc=3, verbose=0)))
    first.start()
    time.sleep(2)
    with pytest.raises(LaunchError, match=r"0 of 3 tasks had started after 1 s .*Other jobs may hold the slots"):
        run(my_rank, num_proc=3, start_timeout=1, verbose=0)
    first.join(60)
    assert [len(ranks) for ranks in outcome] == [3]
    assert run(my_rank, num_proc=4, verbose=0) == [0, 1, 2, 3]  # nothing of the one that gave up is left in the queue


def test_the_mailbox_of_a_local_master_is_private_and_goes(spark: Any, temporary: Path) -> None:
    def fn() -> list[str]:
        (folder,) = temporary.glob("sparkvod-run-*")
        return [stat.filemode(folder.stat().st_mode)]

    assert run(fn, num_proc=1) == [["drwx------"]]
    with pytest.raises(WorkerError):
        run(raise_on, (0, ValueError()), num_proc=1)
    assert list(temporary.iterdir()) == []


def test_folders_of_killed_drivers_are_removed(spark: Any, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = "from sparkvod.launch.private_folder import STORE, PrivateFolder"
    make += "; run, store = PrivateFolder(), PrivateFolder(STORE); print(run.path, store.path, flush=True)"
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(sys.path)}
    drivers = [
        subprocess.Popen(
            [sys.executable, "-c", f"{make}; input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(2)
    ]
    made = [[Path(path) for path in driver.stdout.readline().split()] for driver in drivers]  # type: ignore[union-attr]
    kept, left = made
    drivers[1].kill()
    drivers[1].communicate(timeout=20)
    try:
        assert all(path.is_dir() for path in left)
        assert run(my_rank, num_proc=1, verbose=0) == [0]
        assert all(path.is_dir() for path in left)  # too young to be known as leftovers
        monkeypatch.setattr("sparkvod.launch.private_folder._YOUNG_SECONDS", 0.0)
        assert run(my_rank, num_proc=1, verbose=0) == [0]
        assert not any(path.exists() for path in left)
        assert all(path.is_dir() for path in kept)
    finally:
        drivers[0].communicate("\n", timeout=20)
    assert not any(path.exists() for path in kept)  # they go with their process


def test_a_reused_python_worker_is_as_it_was(spark: Any) -> None:
    def look() -> dict[str, Any]:
        environment = {k: v for k, v in os.environ.items() if k.startswith("SPARKVOD")}
        return {"path": len(sys.path), "env": environment, "pid": os.getpid()}

    def state(batches: Any) -> Any:
        import pyarrow as pa

        from sparkvod.launch import context
        from sparkvod.observe import mailbox

        for _ in batches:
            pass
        facts = [sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__, context.current() is None]
        facts += [type(mailbox.current()).__name__ == "NullPoster", not context._hooks, "SPARKVOD_X" not in os.environ]
        facts += [not [t for t in threading.enumerate() if t.name.startswith("sparkvod")]]
        yield pa.RecordBatch.from_pydict({"fact": facts})

    def fn() -> dict[str, Any]:
        import logging

        context.on_exit(lambda error: None)
        logging.getLogger("of.a.test").addHandler(logging.StreamHandler())
        print("something")
        return look()

    run(fn, num_proc=1, env={"SPARKVOD_X": "1"}, verbose=0)
    rows = spark.range(0, 1, 1, 1).mapInArrow(state, "fact boolean").collect()
    assert all(row.fact for row in rows), rows


def test_large_results_and_arguments_do_not_pass_through_sparks_driver(
    spark: Any, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried: list[int] = []
    results = _spark_worker.results
    monkeypatch.setattr(
        _spark_worker, "results", lambda table, *rest: carried.append(table.nbytes) or results(table, *rest)
    )
    data = os.urandom(20 << 20)

    def fn(given: bytes) -> bytes:
        (folder,) = temporary.glob("sparkvod-run-*")
        assert (folder / "call").stat().st_size > len(given)
        return given

    assert run(fn, (data,), num_proc=2) == [data, data]
    assert carried[0] < 1000
    assert list(temporary.iterdir()) == []


@pytest.mark.timeout(150)
def test_results_larger_than_the_default_driver(leave_to_full: Callable[[str], None]) -> None:
    leave_to_full("it takes 600 MB in a session of its own")
    script = """
        from pyspark.sql import SparkSession
        import sparkvod
        spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
        print([len(x) for x in sparkvod.run(lambda: b"x" * 300_000_000, num_proc=2)])
        print(sparkvod.run(lambda: 1, num_proc=2))
        spark.stop()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=140)
    assert done.stdout.split("\n")[:2] == ["[300000000, 300000000]", "[1, 1]"], done.stderr[-3000:]


IDLE = "spark.sql.execution.pyspark.udf.idleTimeoutSeconds"


def test_spark_does_not_end_a_rank_that_is_quiet(spark: Any) -> None:
    settings = {IDLE: "1", "spark.sql.execution.pyspark.udf.killOnIdleTimeout": "true"}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        assert run(lambda: time.sleep(2.5), num_proc=2, verbose=0) == [None, None]
        assert spark.conf.get(IDLE) == "1"
        with without_idle_timeout(spark):  # two of one session, which end in another order than they began
            first, second = without_idle_timeout(spark), without_idle_timeout(spark)
            first.__enter__()
            second.__enter__()
            first.__exit__(None, None, None)
            assert spark.conf.get(IDLE) == "0"
            assert spark.newSession().conf.get(IDLE, None) != "1"
            second.__exit__(None, None, None)
            assert spark.conf.get(IDLE) == "0"
        assert spark.conf.get(IDLE) == "1"
    finally:
        for name in settings:
            spark.conf.unset(name)


def test_a_session_that_ends_meanwhile_is_told(spark: Any) -> None:
    job = Job(spark, "fn", 2, 10, None, False, LinePrinter(0), None)
    for text in ("ConnectionRefusedError: [Errno 111]", "Job 3 cancelled because SparkContext was shut down"):
        assert "the Spark session ended while the job ran" in str(job._explain(text))


def test_what_fails_outside_the_function_is_told(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkvod.launch._spark_worker.SCHEMA", "something binary")
    with pytest.raises(LaunchError, match="failed outside the function: Job aborted(?s:.*)getBinary") as caught:
        run(my_rank, num_proc=1)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[SPARK-24819]: Barrier execution mode does not allow", "Spark refused the barrier stage: SPARK-24819"),
        ("Total size of results is bigger than spark.driver.maxResultSize (1g)", "larger spark.driver.maxResultSize"),
        (
            "x PythonException: Traceback\n  ImportError: y\n\tat a.b",
            "outside the function: Traceback\n  ImportError: y",
        ),
        ("x java.lang.OutOfMemoryError: Java heap space", "ran out of memory .*mailbox=.*spark.executor.memory"),
        ("ExecutorLostFailure (executor 1 exited)\nmore", "an executor was lost.*ExecutorLostFailure"),
    ],
)
def test_what_spark_says_is_made_sense_of(spark: Any, text: str, said: str) -> None:
    job = Job(spark, "fn", 2, 10, None, False, LinePrinter(0), None)
    assert re.search(said, str(job._explain(text))), job._explain(text)


@pytest.mark.usefixtures("temporary")
def test_of_a_lost_executor_those_that_noticed_tell_the_rank(spark: Any, tmp_path: Path) -> None:
    """Spark says which executor was lost, and the rank that noticed it speaks a moment later."""
    (box := mailbox.Mailbox(str(tmp_path / "box"))).create()
    for rank in (0, 1):
        box.poster(rank).post("started", partition=rank, host=f"host{rank}")
    job = Job(spark, "fn", 2, 10, box, False, LinePrinter(0), None)
    job.read()
    seen = PeerLostError("rank 1 on host1 left during negotiation: its process ended")
    text = Failure.capture(seen, 0, "host0").to_json()
    later = threading.Timer(0.3, lambda: box.poster(0).post("failure", failure=text))
    later.start()
    told = job._explain("ExecutorLostFailure (executor 1 exited unrelated to the running tasks) worker lost")
    later.join()
    assert isinstance(told, WorkerLostError)
    assert (told.rank, told.host) == (1, "host1")
    box.close()


def test_a_launcher_takes_defaults_where_nothing_was_given() -> None:
    mine = SparkLauncher(2, {"A": "b"}, start_timeout=5)
    made = mine.with_defaults(start_timeout=7, mailbox="m", mailbox_options={"o": 1})
    assert made._options == {"start_timeout": 5, "mailbox": "m", "mailbox_options": {"o": 1}}
    assert (made._num_proc, made._env, mine._options) == (2, {"A": "b"}, {"start_timeout": 5})
    # What belongs to one mailbox does not go with another.
    own = SparkLauncher(mailbox="mine").with_defaults(mailbox="m", mailbox_options={"o": 1})
    assert own._options == {"mailbox": "mine"}


def test_given_streams_get_the_lines_with_their_time(spark: Any) -> None:
    out, err = io.StringIO(), io.StringIO()

    def fn() -> None:
        print("to out")
        print("to err", file=sys.stderr)

    run(fn, num_proc=1, verbose=0, stdout=out, stderr=err, prefix_output_with_timestamp=True)
    assert out.getvalue().endswith("[0]<stdout>:to out\n")
    assert err.getvalue().endswith("[0]<stderr>:to err\n")
    time.strptime(out.getvalue().partition("[")[0])


def test_the_peers_arguments_without_meaning_are_warned_of(spark: Any, caplog: pytest.LogCaptureFixture) -> None:
    run(my_rank, num_proc=1, use_mpi=True, use_gloo=True, extra_mpi_args="-x", nics=["eth0"], executable="python9")
    for name in ("use_mpi=True", "extra_mpi_args='-x'", "nics=['eth0']", "executable='python9'"):
        assert f"{name} has no meaning in sparkvod.run and is ignored" in caplog.text
    assert "use_gloo" not in caplog.text


class TestAsOnACluster:
    """Without a private directory: the ranks meet through Spark, failures travel in Spark's error text."""

    @pytest.fixture(autouse=True)
    def _no_private_directory(self, spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launch_spark, "on_this_host", lambda spark: False)

    def test_the_world_meets_through_spark(self, caplog: pytest.LogCaptureFixture) -> None:
        def fn() -> list[bytes]:
            return context.current().allgather(b"%d" % my_rank())  # type: ignore[union-attr]

        assert run(fn, num_proc=2) == [[b"0", b"1"]] * 2
        assert caplog.text.count("the ranks' output is in the executors' logs") == 1

    def test_a_failure_travels_in_sparks_error(self) -> None:
        with pytest.raises(WorkerError, match="rank 1 on .* raised ValueError: boom") as caught:
            run(raise_on, (1, ValueError("boom")), num_proc=2, verbose=0)
        assert isinstance(caught.value.__cause__, ValueError)
        assert "raise_on" in caught.value.traceback

    def test_a_lost_process_is_told(self) -> None:
        with pytest.raises(WorkerLostError, match="ended without a word"):
            run(lambda: my_rank() == 1 and os._exit(3), num_proc=2, verbose=0)

    def test_results_that_spark_cannot_carry_are_refused_and_it_lives(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sparkvod.launch._spark_slots.result_bytes", lambda conf: (3_000_000, 1 << 40))
        assert run(lambda: b"x" * 1_000_000, num_proc=2, verbose=0) == [b"x" * 1_000_000] * 2
        with pytest.raises(
            WorkerError,
            match=r"are 4,00.* bytes \(that of rank 1 3,00.*\).* could bring 3,000,000 through the driver, .*mailbox=",
        ):
            run(lambda: b"x" * (1_000_000 + 2_000_000 * my_rank()), num_proc=2, verbose=0)
        monkeypatch.setattr("sparkvod.launch._spark_slots.result_bytes", lambda conf: (1 << 40, 1_500_000))
        with pytest.raises(
            WorkerError, match="results of the ranks of one executor are 2,0.* by spark.executor.memory"
        ):
            run(lambda: b"x" * 1_000_000, num_proc=2, verbose=0)
        assert run(my_rank, num_proc=2, verbose=0) == [0, 1]

    def test_a_gather_that_a_returned_rank_cannot_join_fails(self) -> None:
        with pytest.raises(WorkerError, match="rank 0 has returned without this all-gather"):
            run(lambda: my_rank() and context.current().allgather(b""), num_proc=2, verbose=0)  # type: ignore[union-attr]

    def test_a_rank_that_never_comes_ends_the_start_in_time(self) -> None:
        began = time.monotonic()
        with pytest.raises(WorkerError, match=r"not all of 2 ranks called init\(\) within 0.5 s") as caught:
            run(
                lambda: my_rank() and context.current().allgather(b"") or time.sleep(60),  # type: ignore[union-attr]
                num_proc=2,
                verbose=0,
                env={"SPARKVOD_START_TIMEOUT": "0.5"},
            )
        assert time.monotonic() - began < 40
        assert caught.value.lost_peer

    def test_large_results_go_through_a_shared_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sparkvod.launch._spark_slots.result_bytes", lambda conf: (1, 1))
        data = os.urandom(10 << 20)
        results = run(lambda: data if my_rank() else None, num_proc=2, mailbox=str(tmp_path / "box"), verbose=0)
        assert results == [None, data]
        assert list((tmp_path / "box").iterdir()) == []

    def test_tasks_that_cannot_start(self, spark: Any) -> None:
        def slow(batches: Any) -> Any:
            time.sleep(6)
            yield from batches

        other = threading.Thread(target=lambda: spark.range(0, 4, 1, 4).mapInArrow(slow, "id long").collect())
        other.start()
        time.sleep(1.5)
        with pytest.raises(LaunchError, match="not all of 2 tasks had started after 1 s"):
            run(my_rank, num_proc=2, start_timeout=1, verbose=0)
        other.join(60)

    def test_a_shared_folder_brings_lines_and_events(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
    ) -> None:
        events: list[dict[str, Any]] = []

        def fn() -> None:
            print("a line")
            mailbox.current().post("progress", step=3)

        run(fn, num_proc=2, mailbox=str(tmp_path / "box"), on_event=events.append)
        assert {(e["rank"], e["step"]) for e in events} == {(0, 3), (1, 3)}
        assert "[1]<stdout>:a line" in capsys.readouterr().out
        assert "executors' logs" not in caplog.text
        assert list((tmp_path / "box").iterdir()) == []

    def test_a_mailbox_that_cannot_be_made_is_told_before_submission(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(LaunchError, match="the mailbox .*file/sparkvod-.* cannot be made"):
            run(my_rank, num_proc=1, mailbox=str(tmp_path / "file"))

    def test_pickles_in_a_shared_folder_are_not_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[bool] = []
        original = Failure.from_json
        monkeypatch.setattr(
            "sparkvod.launch._spark_job.Failure.from_json",
            lambda text, trusted: asked.append(trusted) or original(text, trusted),
        )
        with pytest.raises(WorkerError, match="ValueError: boom"):
            run(raise_on, (1, ValueError("boom")), num_proc=2, mailbox=str(tmp_path), verbose=0)
        assert True in asked  # the one in Spark's own error text
        assert False in asked  # the one in the folder
