"""Local processes, one per rank: :func:`run_local`.

Workers are fresh interpreters (never forks of this process, which may have threads), so no ``if __name__`` guard is
needed and a notebook will do. Function, arguments and results travel over an inherited socket pair; so do the ranks'
all-gathers, which this process relays. Everything happens in the calling thread, in one selector loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparkvod.launch._checks import check_call, check_count, check_env, check_handler, check_seconds
from sparkvod.launch._local_world import LocalWorld
from sparkvod.launch._pickle import dump_call
from sparkvod.launch.launcher import EventHandler, Launcher
from sparkvod.launch.output import LinePrinter


def run_local(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 2,
    env: Mapping[str, str | None] | None = None,
    verbose: int = 1,
    timeout: float | None = None,
    on_event: EventHandler | None = None,
) -> list[Any]:
    """Runs ``fn(*args, **kwargs)`` in ``np`` local processes that form a world, and returns the results by rank.

    Args:
        fn: the function; lambdas, closures and functions of ``__main__`` or a notebook will do.
        args: its positional arguments.
        kwargs: its keyword arguments.
        np: number of ranks.
        env: environment variables on top of this process's; None removes one. ``OMP_NUM_THREADS`` is this host's
            cores divided by ``np`` unless it is set here or there.
        verbose: 0 keeps what the ranks print for the message of an error; else it is printed with its rank.
        timeout: seconds that the whole run may take; None: any.
        on_event: called with each event that a rank posts, see :meth:`sparkvod.launch.launcher.Launcher.run`.

    Raises:
        WorkerError: a rank raised; the others were ended. Its cause is that rank's own exception.
        WorkerLostError: a rank's process ended without a result.
        LaunchError: the processes could not be started, or the timeout passed.
        ValueError: ``np`` is below 1, ``timeout`` not above 0.
        TypeError: an argument is of a wrong type, or the function or its arguments cannot be pickled.
    """
    check_call(fn, args, kwargs)
    np = check_count("np", np)
    check_env(env)
    check_handler(on_event)
    timeout = check_seconds("timeout", timeout)
    task = dump_call(fn, args, kwargs)
    printer = LinePrinter(verbose)
    with LocalWorld(np, task, dict(env or {}), printer, on_event) as world:
        return world.run(timeout)


class LocalLauncher(Launcher):
    """Runs functions in local processes; see :func:`run_local` for the arguments.

    Args:
        num_proc: number of ranks.
        env: environment variables for every run.
        verbose: see :func:`run_local`.
        timeout: seconds that one run may take; None: any.
    """

    def __init__(
        self,
        num_proc: int = 2,
        env: Mapping[str, str | None] | None = None,
        verbose: int = 1,
        timeout: float | None = None,
    ) -> None:
        num_proc = check_count("num_proc", num_proc)
        self._num_proc, self._env, self._verbose, self._timeout = num_proc, dict(env or {}), verbose, timeout

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
        on_event: EventHandler | None = None,
    ) -> list[Any]:
        """See :meth:`sparkvod.launch.launcher.Launcher.run`."""
        env = {**self._env, **(env or {})}
        return run_local(fn, args, kwargs, self._num_proc, env, self._verbose, self._timeout, on_event)

    def num_processes(self) -> int:
        """See :meth:`sparkvod.launch.launcher.Launcher.num_processes`."""
        return self._num_proc
