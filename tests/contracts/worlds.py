"""Runs checks inside a world of ranks: one world for many checks, because starting processes and frameworks is slow.

A check is a function that every rank calls with the same arguments; it asserts. A check that fails ends its world,
and the checks behind it run in a fresh one, so that each check's outcome is its own.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import sparkvod
from sparkvod.errors import LaunchError, WorkerError

Check = Callable[..., None]
_MARK = "the check that failed: "


class Suite:
    """Checks, and their outcomes by number of ranks.

    Args:
        checks: the functions; their names must differ.
        args: what each is called with.
        setup: called first in each world, with the same arguments.
        env: environment variables of the ranks.
        timeout: seconds for all checks together, per world.
    """

    def __init__(
        self,
        checks: Sequence[Check],
        args: Sequence[Any] = (),
        setup: Check | None = None,
        env: dict[str, str] | None = None,
        timeout: float = 90,
    ) -> None:
        self._checks = {check.__name__: check for check in checks}
        self._args, self._setup, self._timeout = tuple(args), setup, timeout
        # The checks' tensors are small, and the ranks may be more than the cores.
        self._env = {"OMP_NUM_THREADS": "1", **(env or {})}
        self._outcomes: dict[int, dict[str, str | None]] = {}

    @property
    def names(self) -> list[str]:
        """The checks' names."""
        return list(self._checks)

    def verify(self, name: str, size: int) -> None:
        """Raises ``AssertionError`` with the rank's traceback if a check fails in a world of ``size`` ranks."""
        if size not in self._outcomes:
            self._outcomes[size] = self._run(size)
        complaint = self._outcomes[size][name]
        if complaint is not None:
            raise AssertionError(complaint)

    def _run(self, size: int) -> dict[str, str | None]:
        outcomes: dict[str, str | None] = {}
        left = list(self._checks)
        while left:
            checks = [self._checks[name] for name in left]
            try:
                sparkvod.run_local(
                    _run_in_rank,
                    (self._setup, checks, self._args),
                    np=size,
                    env=self._env,
                    verbose=0,
                    timeout=self._timeout,
                )
                failed, complaint = None, ""
            except (WorkerError, LaunchError) as error:
                complaint = str(error)
                at = complaint.rfind(_MARK)
                failed = complaint[at + len(_MARK) :].split()[0] if at >= 0 else left[0]
            passed = left if failed is None else left[: left.index(failed)]
            outcomes.update(dict.fromkeys(passed))
            left = left[len(passed) :]
            if failed is not None:
                outcomes[failed] = complaint
                left = left[1:]
        return outcomes


def _run_in_rank(setup: Check | None, checks: Sequence[Check], args: Sequence[Any]) -> None:
    if setup is not None:
        setup(*args)
    for check in checks:
        try:
            check(*args)
        except BaseException:
            raise AssertionError(f"{traceback.format_exc()}\n{_MARK}{check.__name__} ") from None
