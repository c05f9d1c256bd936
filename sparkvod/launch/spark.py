"""Spark as a launcher: :func:`run` and :class:`SparkLauncher`.

One barrier stage runs one function in all its tasks, through ``DataFrame.mapInArrow(barrier=True)``, which exists in
classic Spark and in Spark Connect alike; nothing here touches a SparkContext. The stage is the job's last one, so a
failing task ends the job at once and is never repeated by Spark.
"""

from __future__ import annotations

import copy
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from sparkvod import config, log
from sparkvod.errors import LaunchError
from sparkvod.launch import _spark_slots, _spark_worker
from sparkvod.launch._checks import check_call, check_count, check_env, check_handler, check_seconds
from sparkvod.launch._pickle import dump_call
from sparkvod.launch._spark_call import interruptible
from sparkvod.launch._spark_job import Job
from sparkvod.launch._spark_session import advising, check_session, check_workers_python, is_connect, no_session
from sparkvod.launch.launcher import EventHandler, Launcher
from sparkvod.launch.output import LinePrinter
from sparkvod.launch.private_folder import PrivateFolder
from sparkvod.observe.mailbox import Mailbox

__all__ = [
    "SparkLauncher",
    "advising",
    "check_session",
    "check_workers_python",
    "interruptible",
    "on_this_host",
    "run",
]

_logger = log.get("launch.spark")
_sees_us: dict[str, bool] = {}


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str | None] | None = None,
    stdout: IO[str] | None = None,
    stderr: IO[str] | None = None,
    verbose: int = 1,
    nics: Any = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    *,
    on_event: EventHandler | None = None,
    mailbox: str | None = None,
    mailbox_options: Mapping[str, Any] | None = None,
    spark: Any = None,
) -> list[Any]:
    """Runs ``fn(*args, **kwargs)`` on ``num_proc`` Spark tasks that form a world; returns the results by rank.

    Args:
        fn: the function; it runs in Spark's Python workers, pickled by cloudpickle.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: number of ranks; by default as many as can run at once, else ``spark.default.parallelism``.
        start_timeout: seconds within which all tasks must have started (knob ``spark_start_timeout``).
        use_mpi: has no meaning here and is warned of; likewise ``extra_mpi_args``, ``nics``, ``executable``.
        use_gloo: has no meaning here: the engine brings its own transports.
        extra_mpi_args: see ``use_mpi``.
        env: environment variables for the ranks, on top of the executors'; None removes one.
        stdout: where the ranks' standard output goes; ``sys.stdout`` by default.
        stderr: where their standard error goes; ``sys.stderr`` by default.
        verbose: 0 prints no lines of the ranks.
        nics: see ``use_mpi``; the knob ``address`` says which address a rank listens on.
        prefix_output_with_timestamp: puts the time before each line.
        executable: see ``use_mpi``; ``spark.pyspark.python`` says which Python the executors run.
        on_event: called on the driver with each event that a rank posts through
            :func:`sparkvod.observe.mailbox.current`, while the ranks run.
        mailbox: url of a directory that driver and executors reach, for live logs and events on a cluster. A local
            master needs none.
        mailbox_options: fsspec's options for it. They travel in Spark's plan: put no secret there, let the executors
            find their own credentials.
        spark: the session; the active one by default.

    Raises:
        WorkerError: a rank failed: the first cause, with its rank, host and traceback; its ``__cause__`` is the rank's
            own exception when that can be pickled.
        LaunchError: no session, a workers' Python without sparkvod, too few slots, dynamic allocation, or the tasks
            did not start in time.
        TypeError: an argument is of a wrong type, or the function or its arguments cannot be pickled.
        ValueError: ``num_proc`` is below 1, ``start_timeout`` not above 0.
    """
    check_call(fn, args, kwargs)
    if num_proc is not None:
        num_proc = check_count("num_proc", num_proc)
    check_env(env)
    check_handler(on_event)
    timeout = check_seconds("start_timeout", start_timeout) or config.get("spark_start_timeout")
    _warn_of_meaningless(use_mpi=use_mpi, extra_mpi_args=extra_mpi_args, nics=nics, executable=executable)
    spark = spark or _session()
    check_session(spark)
    conf = _spark_slots.conf_of(spark)
    num_proc = _spark_slots.check(conf, num_proc)
    function = dump_call(fn, args, kwargs)
    here = _spark_slots.is_one_host(conf) and on_this_host(spark)
    local = here and _spark_slots.is_local(conf)
    with _MailboxFolder(mailbox, mailbox_options, here) as folder:
        listens = verbose > 0 or on_event is not None or stdout is not None or stderr is not None
        if not folder.url and listens:
            _logger.warning(
                "the ranks' output is in the executors' logs: give run(mailbox=...) a directory that driver and "
                "executors reach to see it here"
            )
        digest = ""
        if folder.box and len(function) > _spark_worker.LARGE_BYTES:
            digest, function = folder.box.put(_spark_worker.CALL_NAME, function), b""
        task = _spark_worker.Task(
            function,
            {name: None if value is None else str(value) for name, value in (env or {}).items()},
            folder.url,
            folder.options,
            private=folder.private,
            copy=not local,  # a local executor's log is this terminal
            digest=digest,
            limits=_spark_slots.result_bytes(conf),
        )
        printer = LinePrinter(verbose, stdout, stderr, prefix_output_with_timestamp)
        name = getattr(fn, "__name__", type(fn).__name__)
        paths = [path or os.getcwd() for path in sys.path] if local else []
        job = Job(spark, name, num_proc, timeout, folder.box, folder.private, printer, on_event)
        return job.run(task, paths)


class SparkLauncher(Launcher):
    """Runs functions on Spark tasks; see :func:`run` for what further arguments mean.

    Args:
        num_proc: number of ranks; by default as many as can run at once.
        env: environment variables for every run.
        verbose: see :func:`run`.
        options: further arguments of :func:`run`, such as ``start_timeout``, ``mailbox`` and ``spark``.
    """

    def __init__(
        self,
        num_proc: int | None = None,
        env: Mapping[str, str | None] | None = None,
        verbose: int = 1,
        **options: Any,
    ) -> None:
        if num_proc is not None:
            num_proc = check_count("num_proc", num_proc)
        self._num_proc, self._env, self._verbose, self._options = num_proc, dict(env or {}), verbose, options

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
        on_event: EventHandler | None = None,
    ) -> list[Any]:
        """See :meth:`sparkvod.launch.launcher.Launcher.run`."""
        options = {**self._options, **({"on_event": on_event} if on_event else {})}
        env = {**self._env, **(env or {})}
        return run(fn, args, kwargs, self._num_proc, env=env, verbose=self._verbose, **options)

    def with_defaults(self, **options: Any) -> SparkLauncher:
        """Returns this launcher with further arguments of :func:`run`, where none were given."""
        if "mailbox" in self._options:
            options = {name: value for name, value in options.items() if not name.startswith("mailbox")}
        made = copy.copy(self)
        made._options = {**options, **self._options}
        return made

    def num_processes(self) -> int:
        """Returns the number of ranks; checks that the session can run them at once."""
        spark = self._options.get("spark") or _session()
        return _spark_slots.check(_spark_slots.conf_of(spark), self._num_proc)

    def ask_for_slots(self) -> None:
        """Waits until the session can run all ranks, where its configuration does not reveal how many it can run.

        Raises:
            LaunchError: it cannot within the start-up time.
        """
        spark = self._options.get("spark") or _session()
        if _spark_slots.num_slots(_spark_slots.conf_of(spark)) is None:
            timeout = self._options.get("start_timeout") or config.get("spark_start_timeout")
            Job(spark, "slots", self.num_processes(), timeout, None, False, LinePrinter(0), None).ask_for_slots()


def _warn_of_meaningless(**arguments: Any) -> None:
    cures = {
        "use_mpi": "the engine brings its own transports",
        "extra_mpi_args": "no mpirun is started",
        "nics": "set SPARKVOD_ADDRESS in env to choose the address that a rank listens on",
        "executable": "set spark.pyspark.python to choose the executors' Python",
    }
    for name, value in arguments.items():
        if value:
            _logger.warning("%s=%r has no meaning in sparkvod.run and is ignored: %s", name, value, cures[name])


def _session() -> Any:
    try:
        from pyspark.sql import SparkSession
    except ImportError as e:
        raise LaunchError(f"pyspark cannot be imported ({e}); install sparkvod[spark]") from e
    try:
        return SparkSession.active()
    except Exception as e:  # the class differs between classic, Connect and releases
        raise LaunchError(no_session(type(e).__name__)) from e


def on_this_host(spark: Any) -> bool:
    """Tells whether the server of the session, and so a local master's tasks, see this host's directories.

    In classic Spark they do. In Connect the server may be anywhere, also at the other end of a tunnel, so a task
    looks for a directory made here, once per session.
    """
    client = getattr(spark, "client", None) if is_connect(spark) else None
    if client is None:
        return True
    if getattr(client, "host", "") not in ("localhost", "127.0.0.1", "[::1]"):
        return False
    session = str(getattr(spark, "session_id", id(spark)))
    if session not in _sees_us:
        with tempfile.TemporaryDirectory(prefix="sparkvod-look-") as folder:
            frame = spark.range(0, 1, 1, 1).mapInArrow(_look_for(folder), "seen boolean")
            until = time.monotonic() + config.get("spark_start_timeout")

            def check_time(call: Any) -> None:
                if time.monotonic() > until:
                    raise LaunchError(
                        f"a Spark job of one task did not end within {config.get('spark_start_timeout'):g} s: other "
                        "jobs may hold the slots; wait for them, or raise SPARKVOD_SPARK_START_TIMEOUT"
                    )

            _sees_us[session] = bool(interruptible(spark, "look", frame.collect, check_time)[0].seen)
    return _sees_us[session]


def _look_for(folder: str) -> Callable[..., Any]:
    def sparkvod_look(batches: Any) -> Any:
        import os

        import pyarrow as pa

        for _ in batches:
            pass
        yield pa.RecordBatch.from_pydict({"seen": [os.path.isdir(folder)]})

    return sparkvod_look


class _MailboxFolder:
    """The mailbox of one run: a private temporary directory, a folder inside the caller's, or none."""

    def __init__(self, url: str | None, options: Mapping[str, Any] | None, local: bool) -> None:
        self.options = dict(options or {})
        self.private = url is None and local
        self._folder: PrivateFolder | None = None
        self.url = f"{url.rstrip('/')}/sparkvod-{secrets.token_hex(8)}" if url else ""
        self.box: Mailbox | None = None

    def __enter__(self) -> _MailboxFolder:
        if self.private:
            self._folder = PrivateFolder()
            self.url = self._folder.path
        if self.url:
            self.box = Mailbox(self.url, self.options)
            try:
                self.box.create()
            except OSError as e:
                raise LaunchError(
                    f"the mailbox {self.url} cannot be made ({e}); give a directory that driver and executors can write"
                ) from e
        return self

    def __exit__(self, *error: object) -> None:
        if self.box is not None:
            self.box.close()
        if self._folder is not None:
            self._folder.remove()
        elif self.box is not None:
            self.box.remove()
