"""What a launcher is: something that runs one function on every rank of a world that it starts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

EventHandler = Callable[[dict[str, Any]], None]


class Launcher(ABC):
    """Starts a world of ranks, runs a function on each, and ends the world.

    On each rank the function runs inside :func:`sparkvod.launch.context.use`, so that ``init()`` finds its world, and
    the exit hooks run after it. The function and its arguments are pickled by cloudpickle (lambdas, closures and
    functions of ``__main__`` will do). A rank that fails ends the others.
    """

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
        on_event: EventHandler | None = None,
    ) -> list[Any]:
        """Runs ``fn(*args, **kwargs)`` on every rank and returns the results by rank.

        Args:
            fn: the function.
            args: its positional arguments.
            kwargs: its keyword arguments.
            env: environment variables for the ranks, on top of what they have; None removes one.
            on_event: called here, in the caller's process, with each event that a rank posts through
                :func:`sparkvod.observe.mailbox.current`, while the ranks run.

        Raises:
            WorkerError: a rank's function raised, or its process was lost; the first cause, with rank and host.
            LaunchError: the ranks could not be started.
        """

    @abstractmethod
    def num_processes(self) -> int:
        """Returns the number of ranks that :meth:`run` starts."""
