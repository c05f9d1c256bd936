"""Running a task on the ranks of a launcher, again after a lost rank, and where the time of a fit goes."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sparkvod import log
from sparkvod.errors import LaunchError, SparkvodError, WorkerError
from sparkvod.estimators.task import TrainResult, TrainTask, train

_LOG = log.get("estimators")


class Timings(dict[str, float]):
    """Seconds by phase."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the body's seconds to the phase ``name``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self[name] = self.get(name, 0.0) + time.perf_counter() - began

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.items())


def split(started: float, moments: dict[str, float], ended: float) -> dict[str, float]:
    """Splits the time of a launch; the workers' clock may differ from ours, so the parts are kept inside the whole."""
    first = min(max(moments["first_step"], started), ended)
    trained = min(max(moments["trained"], first), ended)
    return {"starting": first - started, "training": trained - first, "collecting": ended - trained}


def announce(listener: Callable[[dict[str, Any]], None] | None, phase: str, text: str) -> None:
    """Says what begins now, so that nobody waits in front of nothing before the first steps."""
    if listener is not None:
        listener({"kind": "phase", "phase": phase, "text": text, "rank": 0, "time": time.time()})


def run_until_done(
    launcher: Any, task: TrainTask, restarts: int, listener: Any, env: dict[str, str | None]
) -> list[TrainResult]:
    """Runs the task, again from its last checkpoint when a rank was lost, up to ``restarts`` times.

    Every run is a new world with a new secret, so that a rank of an earlier one that is not dead yet cannot join.

    Args:
        launcher: an object with ``run`` and ``num_processes``.
        task: what each rank is sent.
        restarts: how often it may start again.
        listener: is called with the events of the ranks, as dicts; or None.
        env: environment variables that the ranks need.

    Returns:
        The ranks' results by rank.

    Raises:
        WorkerError: a rank raised, or ranks were lost once more than ``restarts`` times.
        LaunchError: the ranks could not be started.
        SparkvodError: the launcher returned something else than the ranks' results.
    """
    lost: WorkerError | None = None
    for restart in range(restarts + 1):
        if lost is not None:
            _LOG.warning(
                "run %s starts again from its last checkpoint, restart %d of %d, because it lost a rank: %s",
                task.run_id,
                restart,
                restarts,
                str(lost).partition("\n")[0],
            )
        size = launcher.num_processes()
        announce(listener, "starting", f"run {task.run_id}: starting {size} rank{'s' * (size > 1)}")
        try:
            return _run(launcher, task, listener, env)
        except LaunchError as error:
            raise error from lost
        except WorkerError as error:
            if not error.lost_peer:
                raise
            lost = error
    assert lost is not None
    raise lost


def _run(launcher: Any, task: TrainTask, listener: Any, env: dict[str, str | None]) -> list[TrainResult]:
    """Runs the task; a backend of the user's may know no events."""
    takes_events = "on_event" in inspect.signature(launcher.run).parameters
    options = {**({"env": env} if env else {}), **({"on_event": listener} if takes_events and listener else {})}
    results = launcher.run(train, args=(task,), **options)
    if not results or not isinstance(results[0], TrainResult):
        raise SparkvodError(
            f"{type(launcher).__name__}.run returned {type(results).__name__}, the ranks' results in a list "
            "were expected"
        )
    return results
