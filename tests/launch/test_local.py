from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import sparkvod
from sparkvod.errors import LaunchError, PeerLostError, WorkerError, WorkerLostError
from sparkvod.launch import context
from sparkvod.launch.launcher import Launcher
from sparkvod.launch.local import LocalLauncher, run_local
from tests.contracts.launcher import LauncherContract, my_rank

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_leaks")]


class TestLocalLauncher(LauncherContract):
    def make(self, num_proc: int, **options: Any) -> Launcher:
        return LocalLauncher(num_proc, **options)


def test_it_is_the_packages_run_local() -> None:
    assert sparkvod.run_local is run_local


@pytest.mark.parametrize("np", [0, -1])
def test_no_ranks_are_refused(np: int) -> None:
    with pytest.raises(ValueError, match=f"np={np} was found, at least 1 rank was expected"):
        run_local(my_rank, np=np)


def test_a_killed_rank_is_told_with_signal_and_last_output() -> None:
    def fn() -> None:
        if my_rank() == 0:
            print("my last words")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(WorkerLostError, match=r"rank 0 on .*killed by SIGKILL.*(?s:.*)my last words"):
        run_local(fn, np=2, verbose=0)


def test_the_exit_code_is_told() -> None:
    with pytest.raises(WorkerLostError, match="ended with exit code 3 before it had a result"):
        run_local(lambda: os._exit(3), np=1)


def test_a_timeout_names_the_ranks_that_still_run() -> None:
    began = time.monotonic()
    with pytest.raises(LaunchError, match="ranks 1 of 2 had not ended after 1 s"):
        run_local(lambda: my_rank() and time.sleep(60), np=2, timeout=1)
    assert time.monotonic() - began < 10


def test_a_rank_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkvod.launch._local_world.GRACE_SECONDS", 0.3)

    def fn() -> None:
        if my_rank() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            context.current().allgather(b"")  # type: ignore[union-attr]
            time.sleep(60)
        context.current().allgather(b"")  # type: ignore[union-attr]
        raise ValueError("after the other is deaf")

    with pytest.raises(WorkerError, match="after the other is deaf"):
        run_local(fn, np=2)


def test_what_a_rank_has_started_ends_with_it(tmp_path: Path) -> None:
    def fn() -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid

    (pid,) = run_local(fn, np=1)
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_gather_that_a_returned_rank_cannot_join_fails_at_once() -> None:
    with pytest.raises(WorkerError, match="rank 0 on .* has returned without this all-gather") as caught:
        run_local(lambda: my_rank() and context.current().allgather(b""), np=2)  # type: ignore[union-attr]
    assert isinstance(caught.value.__cause__, PeerLostError)


def test_a_rank_that_does_not_leave_after_its_result_is_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sparkvod.launch._local_world.EXIT_SECONDS", 0.5)

    def fn() -> int:
        threading.Thread(target=time.sleep, args=(60,)).start()
        return my_rank()

    assert run_local(fn, np=1) == [0]
    assert "did not end within 0.5 s and is ended" in caplog.text


def test_a_rank_ends_in_order_and_soon(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    class Slow:
        def __del__(self) -> None:
            time.sleep(30)

    def fn() -> None:
        import atexit
        import ctypes

        sys.modules["kept_until_the_end"] = Slow()  # type: ignore[assignment]
        atexit.register(lambda: print("at exit", flush=True))
        threading.Thread(target=lambda: (time.sleep(0.5), print("of a thread"))).start()
        ctypes.CDLL(None).printf(b"held back by C\n")

    began = time.monotonic()
    run_local(fn, np=1)
    assert time.monotonic() - began < 20
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == ["[0]<stdout>:at exit", "[0]<stdout>:held back by C", "[0]<stdout>:of a thread"]
    assert lines.index("[0]<stdout>:of a thread") < lines.index("[0]<stdout>:at exit")
    assert not caplog.records


def test_output_of_compiled_code_is_taken_too(capsys: pytest.CaptureFixture[str]) -> None:
    run_local(lambda: os.write(1, b"from below Python\n") and None, np=1)
    assert "[0]<stdout>:from below Python" in capsys.readouterr().out


def test_nothing_secret_is_seen_from_outside() -> None:
    def fn(secret: str) -> tuple[list[str], str]:
        return psutil.Process().cmdline(), str(dict(os.environ))

    for line, environment in run_local(fn, ("s3cret-argument",), np=1):
        assert "s3cret" not in " ".join(line)
        assert "s3cret" not in environment


def test_cores_are_shared_unless_the_caller_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert run_local(lambda: os.environ["OMP_NUM_THREADS"], np=2) == [str(max(1, cores // 2))] * 2
    assert run_local(lambda: os.environ["OMP_NUM_THREADS"], np=1, env={"OMP_NUM_THREADS": "7"}) == ["7"]


def script(tmp_path: Path, text: str) -> subprocess.Popen[str]:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def test_a_script_without_a_main_guard(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("answer = 42\n")
    process = script(
        tmp_path,
        """
        import sparkvod
        class Point:  # of __main__: travels by value, and comes back as the same class
            def __init__(self, x): self.x = x
        def fn():
            import beside
            return Point(beside.answer)
        results = sparkvod.run_local(fn, np=2)
        print([type(p) is Point and p.x for p in results])
        """,
    )
    out, _ = process.communicate(timeout=30)
    assert out.strip() == "[42, 42]"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, None)])
def test_ranks_end_with_their_launcher(tmp_path: Path, number: signal.Signals, code: int | None) -> None:
    process = script(
        tmp_path,
        """
        import os, time, sparkvod
        sparkvod.run_local(lambda: (print("pid", os.getpid()), time.sleep(60)), np=2)
        """,
    )
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
    process.send_signal(number)
    out, _ = process.communicate(timeout=15)
    if code is None:
        assert "KeyboardInterrupt" in out
    else:
        assert process.returncode == code
    deadline = time.monotonic() + 5
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank outlived its launcher"
        time.sleep(0.05)
