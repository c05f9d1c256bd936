"""What every launcher promises. A launcher's test file subclasses :class:`LauncherContract` and gives ``make``."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import pytest

from sparkvod import config
from sparkvod.errors import CollectiveTimeoutError, PeerLostError, WorkerError, WorkerLostError
from sparkvod.launch import context
from sparkvod.launch.launcher import Launcher
from sparkvod.observe import mailbox


class OwnError(Exception):
    """An exception that can be pickled, with a field."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message, code)
        self.code = code


class StubbornError(Exception):
    """An exception that pickles but cannot be read back."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def my_rank() -> int:
    world = context.current()
    assert world is not None
    return world.rank


def raise_on(rank: int, error: BaseException, others_sleep: float = 60.0) -> int:
    """Raises on one rank while the others sleep."""
    if my_rank() == rank:
        raise error
    time.sleep(others_sleep)
    return my_rank()


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("no_leaks")
class LauncherContract:
    """The promises. All but the slowest run with two ranks."""

    def make(self, num_proc: int, **options: Any) -> Launcher:
        raise NotImplementedError

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_results_come_by_rank(self, size: int) -> None:
        def fn(a: int, *, b: int) -> tuple[int, int, int]:
            world = context.current()
            assert world is not None
            return world.rank, world.size, a + b

        launcher = self.make(size)
        assert launcher.num_processes() == size
        assert launcher.run(fn, (1,), {"b": 2}) == [(rank, size, 3) for rank in range(size)]

    def test_allgather_may_be_called_again_and_again(self) -> None:
        def fn() -> list[list[bytes]]:
            world = context.current()
            assert world is not None
            return [world.allgather(b"%d of round %d" % (world.rank, n) * (n * 1000 + 1)) for n in range(2)]

        expected = [[b"%d of round %d" % (rank, n) * (n * 1000 + 1) for rank in range(3)] for n in range(2)]
        assert self.make(3).run(fn) == [expected] * 3

    def test_a_rank_that_never_comes_ends_the_start_in_time(self) -> None:
        """The rank that did not come is the one in the error."""

        def fn() -> None:
            if my_rank() == 1:
                time.sleep(60)
            context.current().allgather(b"")  # type: ignore[union-attr]

        began = time.monotonic()
        with pytest.raises(WorkerError, match=r"did not call init\(\) within 0.5 s .*SPARKVOD_START_TIMEOUT") as caught:
            self.make(2).run(fn, env={"SPARKVOD_START_TIMEOUT": "0.5"})
        assert time.monotonic() - began < 15
        assert (caught.value.rank, caught.value.lost_peer) == (1, True)
        assert isinstance(caught.value.__cause__, CollectiveTimeoutError)

    def test_an_empty_message_is_gathered_too(self) -> None:
        assert self.make(2).run(lambda: context.current().allgather(b"")) == [[b"", b""]] * 2  # type: ignore[union-attr]

    def test_large_results_and_arguments(self) -> None:
        data = os.urandom(20 << 20)
        results = self.make(2).run(lambda d: (len(d), d[:10], d), (data,))
        assert results == [(len(data), data[:10], data)] * 2

    def test_none_is_a_result(self) -> None:
        assert self.make(2).run(lambda: None) == [None, None]

    def test_env_is_set_for_the_function_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPARKVOD_TEST_OUTSIDE", "1")
        launcher = self.make(2, env={"SPARKVOD_TEST_A": "of all runs", "SPARKVOD_TEST_B": "of all runs"})

        def fn() -> list[str | None]:
            return [config.environment().get(f"SPARKVOD_TEST_{name}") for name in "ABC"]

        assert (
            launcher.run(fn, env={"SPARKVOD_TEST_B": "of this", "SPARKVOD_TEST_C": None})
            == [["of all runs", "of this", None]] * 2
        )
        assert self.make(2).run(fn) == [[None, None, None]] * 2
        assert "SPARKVOD_TEST_A" not in os.environ

    def test_a_failure_comes_with_rank_host_traceback_and_cause(self) -> None:
        def fails_here() -> None:
            raise_on(1, OwnError("the reason", 42))

        began = time.monotonic()
        with pytest.raises(WorkerError, match="rank 1 on .* raised OwnError") as caught:
            self.make(2).run(fails_here)
        assert time.monotonic() - began < 15  # the promise of 3 s is measured where nothing else runs
        error = caught.value
        assert (error.rank, error.kind, error.lost_peer) == (1, "OwnError", False)
        assert error.host
        assert "in fails_here" in error.traceback
        assert "launcher.py" in error.traceback
        assert isinstance(error.__cause__, OwnError)
        assert error.__cause__.code == 42

    def test_an_exception_that_cannot_be_read_back_still_tells(self) -> None:
        with pytest.raises(WorkerError, match="StubbornError: 1 and 2") as caught:
            self.make(2).run(lambda: raise_on(0, StubbornError(1, 2)))
        assert caught.value.__cause__ is None

    def test_the_cause_comes_before_what_others_noticed(self) -> None:
        def fn() -> None:
            if my_rank() == 0:
                raise PeerLostError("rank 1 is gone")
            time.sleep(0.3)
            raise OwnError("the cause", 1)

        with pytest.raises(WorkerError) as caught:
            self.make(2).run(fn)
        assert (caught.value.rank, caught.value.kind) == (1, "OwnError")

    def test_a_noticed_loss_alone_is_told_as_one(self) -> None:
        with pytest.raises(WorkerError, match="rank 5 is gone") as caught:
            self.make(2).run(lambda: raise_on(my_rank(), PeerLostError("rank 5 is gone")))
        assert caught.value.lost_peer
        assert isinstance(caught.value.__cause__, PeerLostError)

    def test_sys_exit_is_a_failure(self) -> None:
        with pytest.raises(WorkerError, match="SystemExit"):
            self.make(2).run(lambda: sys.exit(0))

    def test_a_process_that_leaves_is_told_with_its_rank(self) -> None:
        def fn() -> None:
            if my_rank() == 1:
                os._exit(7)
            time.sleep(60)

        with pytest.raises(WorkerLostError, match="rank 1 on ") as caught:
            self.make(2).run(fn)
        assert caught.value.rank == 1
        assert caught.value.lost_peer

    def test_what_cannot_be_pickled_is_refused_before_anything_starts(self) -> None:
        lock = threading.Lock()
        with pytest.raises(TypeError, match="cannot be pickled"):
            self.make(2).run(lambda: lock)

    def test_a_result_that_cannot_be_pickled(self) -> None:
        with pytest.raises(WorkerError, match="the result of rank 0, of type lock, cannot be pickled"):
            self.make(1).run(threading.Lock)

    def test_events_arrive_while_the_function_runs(self) -> None:
        events: list[dict[str, Any]] = []
        at: list[float] = []

        def fn() -> float:
            mailbox.current().post("progress", step=1, loss=0.5)
            time.sleep(1.0)
            return time.time()

        ended = self.make(2).run(fn, on_event=lambda event: (events.append(event), at.append(time.time())))  # type: ignore[func-returns-value]
        assert sorted((e["kind"], e["rank"], e["step"], e["loss"]) for e in events) == [
            ("progress", 0, 1, 0.5),
            ("progress", 1, 1, 0.5),
        ]
        assert max(at) < min(ended) + 0.5

    def test_an_event_handler_that_raises_does_not_end_the_run(self) -> None:
        def handler(event: dict[str, Any]) -> None:
            raise ValueError("the handler's own")

        assert self.make(1).run(lambda: mailbox.current().post("x"), on_event=handler) == [None]

    def test_lines_are_printed_with_their_rank(self, capsys: pytest.CaptureFixture[str]) -> None:
        def fn() -> None:
            print("first\nsecond")
            print("no end of line", end="", file=sys.stderr)

        self.make(2, verbose=1).run(fn)
        out, err = capsys.readouterr()
        for rank in range(2):
            assert [line for line in out.splitlines() if line.startswith(f"[{rank}]")] == [
                f"[{rank}]<stdout>:first",
                f"[{rank}]<stdout>:second",
            ]
            assert f"[{rank}]<stderr>:no end of line" in err.splitlines()

    def test_nothing_is_printed_when_not_verbose(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.make(2, verbose=0).run(lambda: print("a line"))
        assert "a line" not in "".join(capsys.readouterr())

    def test_exit_hooks_run_newest_first_with_the_error(self) -> None:
        def fn(error: Exception | None) -> None:
            context.on_exit(lambda e: print(f"first hook {type(e).__name__}"))
            context.on_exit(lambda e: print(f"second hook {type(e).__name__}"))
            if error is not None:
                raise error

        lines: list[str] = []
        for error in (None, ValueError("x")):
            launcher = self.make(1, verbose=1)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("sparkvod.observe.progress.write_line", lambda text, stream: lines.append(text))
                try:
                    launcher.run(fn, (error,))
                except WorkerError:
                    assert error is not None
        assert [line.partition(":")[2] for line in lines] == [
            "second hook NoneType",
            "first hook NoneType",
            "second hook ValueError",
            "first hook ValueError",
        ]

    def test_it_runs_again_after_a_failure(self) -> None:
        launcher = self.make(2)
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:  # of the caller's own, and no part of what the rank raises
            with pytest.raises(WorkerError, match="ValueError: once"):
                launcher.run(lambda: raise_on(0, ValueError("once")))
        assert launcher.run(my_rank) == [0, 1]

    def test_a_reused_worker_keeps_nothing(self) -> None:
        def look() -> tuple[bool, bool, str]:
            before = (hasattr(sys, "_seen_by_test"), type(mailbox.current()).__name__ == "NullPoster")
            return (*before, type(sys.stdout).__name__)

        launcher = self.make(2)
        first = launcher.run(look)
        assert launcher.run(look) == first
