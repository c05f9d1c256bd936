"""What the tests of clusters start: drivers, a standalone cluster, a Connect server, a packed environment."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import JAVA_OPTIONS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODULE = HERE / "their_model.py"
CONF = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
}
_DRIVER_SECONDS = 150


@dataclass(frozen=True)
class Place:
    """Where a process of a cluster runs: its address, what comes before its command, and more environment."""

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    more: Mapping[str, str] = field(default_factory=dict)

    def environment(self, **more: str) -> dict[str, str]:
        """Returns the environment of what runs there."""
        return environment(SPARK_LOCAL_IP=self.address, **self.more, **more)


def spark_home() -> Path:
    """Returns the directory of pyspark's own Spark."""
    import pyspark

    return Path(pyspark.__file__).resolve().parent


def _linked_home(folder: Path) -> Path:
    """Returns a Spark home of links, because a ``local-cluster`` keeps its executors' folders in there."""
    folder.mkdir()
    for entry in spark_home().iterdir():
        if entry.name != "work":
            (folder / entry.name).symlink_to(entry)
    return folder


def left_behind(folder: Path) -> list[str]:
    """Returns the command lines of the processes that still work in a folder or name it."""
    deadline = time.monotonic() + 10
    while True:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if process.status() != psutil.STATUS_ZOMBIE and str(folder) in f"{process.cwd()} {line}":
                    found.append(line)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def environment(**more: str) -> dict[str, str]:
    """Returns this process's environment without what would bring this checkout, or our knobs, to executors."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPARKVOD_", "PYTHONPATH"))}
    return {**kept, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_HOME": str(spark_home()), **more}


def drive(folder: Path, steps: Sequence[str], conf: Mapping[str, str], submit: Sequence[str] = (), **more: Any) -> Any:
    """Runs ``workload.py`` and returns what it found.

    Args:
        folder: for its files; the store is in it.
        steps: names of the workload's steps.
        conf: the session's configuration, beside CONF.
        submit: arguments of ``spark-submit``; none start the driver by Python itself.
        more: further arguments of the workload.
    """
    folder.mkdir(parents=True, exist_ok=True)
    out, arguments = folder / "out.json", folder / "arguments.json"
    told = {"out": str(out), "store": str(folder / "store"), "steps": list(steps), "conf": {**CONF, **conf}, **more}
    arguments.write_text(json.dumps(told))
    command = [str(spark_home() / "bin" / "spark-submit"), *submit] if submit else [sys.executable]
    done = subprocess.run(
        [*command, str(HERE / "workload.py"), str(arguments)],
        cwd=folder,
        env=environment(SPARK_HOME=str(_linked_home(folder / "spark"))),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_DRIVER_SECONDS,
    )
    said = done.stdout[-3000:] + done.stderr[-7000:]
    assert done.returncode == 0, said
    return {**json.loads(out.read_text()), "said": said}


@contextlib.contextmanager
def standalone(folder: Path, places: Sequence[Place] = (Place(), Place())) -> Iterator[str]:
    """A standalone cluster with a worker of one core in each place, and the master in the first; yields its url."""
    folder.mkdir(parents=True, exist_ok=True)
    port, first = free_port(), places[0]
    url = f"spark://{first.address}:{port}"
    deploy = "org.apache.spark.deploy"
    ui = ["--webui-port", "0"]
    with contextlib.ExitStack() as stack:
        master = [f"{deploy}.master.Master", "--host", first.address, "--port", str(port), *ui]
        log = stack.enter_context(_spark_class(folder / "master.log", master, place=first))
        _await(log, "I have been elected leader")
        for number, place in enumerate(places):
            worker = [f"{deploy}.worker.Worker", "--host", place.address, "-c", "1", "-m", "1g", *ui]
            worker += ["-d", str(folder / f"work-{number}"), url]
            stack.enter_context(_spark_class(folder / f"worker-{number}.log", worker, place=place))
        _await(log, "Registering worker", len(places))
        yield url


@contextlib.contextmanager
def connect_server(folder: Path, master: str = "local[2]") -> Iterator[str]:
    """A Spark Connect server in a JVM of its own; yields its url."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    conf = {**CONF, "spark.connect.grpc.binding.port": str(port), "spark.connect.grpc.binding.address": "127.0.0.1"}
    command = ["org.apache.spark.deploy.SparkSubmit", "--master", master]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    for name, value in conf.items():
        command += ["--conf", f"{name}={value}"]
    with _spark_class(folder / "connect.log", [*command, "spark-internal"], memory="1g") as log:
        _await(log, "Spark Connect server started at")
        yield f"sc://127.0.0.1:{port}"


@contextlib.contextmanager
def _spark_class(log: Path, arguments: list[str], memory: str = "256m", place: Place = Place()) -> Iterator[Path]:
    """Runs a class of Spark's; ends it and all that it started."""
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [*place.prefix, str(spark_home() / "bin" / "spark-class"), *arguments],
            cwd=log.parent,
            env=place.environment(SPARK_DAEMON_JAVA_OPTS=JAVA_OPTIONS, SPARK_DAEMON_MEMORY=memory),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield log
    finally:
        below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        for child in psutil.wait_procs(below, timeout=5)[1]:
            child.kill()


def _await(log: Path, words: str, times: int = 1, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while log.read_text(errors="replace").count(words) < times:
        assert time.monotonic() < deadline, f"{words!r} did not come: {log.read_text(errors='replace')[-3000:]}"
        time.sleep(0.1)


def free_port() -> int:
    """Returns a port of the loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def packed_environment(folder: Path) -> Path:
    """Returns a ``.tar.gz`` of a virtual environment that has sparkvod as a wheel would bring it.

    It is relocatable as one packed by venv-pack is. The frameworks, which are gigabytes, stay where they are: a path
    file names their directory, but path files in there, and so an editable sparkvod, do not count.
    """
    home, packed = folder / "environment", folder / "environment.tar.gz"
    venv.create(home, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "sparkvod", site / "sparkvod", ignore=ignored)
    import pyspark

    (site / "frameworks.pth").write_text(f"{Path(pyspark.__file__).resolve().parents[1]}\n")
    with tarfile.open(packed, "w:gz", compresslevel=1) as archive:
        archive.add(home, arcname=".")
    return packed
