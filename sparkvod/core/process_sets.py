"""Process sets: ranks that run collectives of their own."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from sparkvod.core import basics
from sparkvod.core.handles import Pending


class ProcessSet:
    """A set of ranks that runs collectives of its own, once it is registered in a world.

    Args:
        ranks_or_comm: the ranks, in any order.

    Raises:
        TypeError: they are no whole numbers.

    Attributes:
        ranks: the sorted ranks; None for the global set before ``init``.
    """

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        try:
            self._ranks = sorted({operator.index(rank) for rank in ranks_or_comm})
        except TypeError:
            raise TypeError(
                f"{ranks_or_comm!r} was found for the ranks of a process set, a list of whole numbers, ranks of the "
                "world, was expected"
            ) from None
        self._registered: tuple[int, int] | None = None  # generation of the world, id in it

    @property
    def process_set_id(self) -> int | None:
        """0 for the global set, None for one that is not registered in the current world."""
        if self._registered is None or self._registered[0] != basics.generation():
            return None
        # A copy may have come from another process, or the set may have been removed through another copy.
        number = self._registered[1]
        return number if basics.world().process_sets.get(number) == self._ranks else None

    @property
    def ranks(self) -> list[int] | None:
        """The sorted ranks."""
        return self._ranks

    def size(self) -> int | None:
        """Returns the number of ranks, None if the set is not registered."""
        return None if self.process_set_id is None else len(self.ranks or ())

    def rank(self) -> int | None:
        """Returns this process's rank within the set, None if it is none of it or the set is not registered."""
        return (self.ranks or []).index(basics.rank()) if self.included() else None

    def included(self) -> bool | None:
        """Returns whether this process is in the set, None if the set is not registered."""
        return None if self.process_set_id is None else basics.rank() in (self.ranks or ())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessSet):
            return NotImplemented
        if self.process_set_id is not None and self.process_set_id == other.process_set_id:
            return True
        return self.ranks is not None and self.ranks == other.ranks

    def __hash__(self) -> int:
        return hash(ProcessSet)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalProcessSet(ProcessSet):
    def __init__(self) -> None:
        super().__init__(())

    @property
    def process_set_id(self) -> int | None:
        return 0

    @property
    def ranks(self) -> list[int] | None:
        return list(range(basics.size())) if basics.is_initialized() else None

    def rank(self) -> int | None:
        return basics.rank()

    def included(self) -> bool | None:
        return True

    def __reduce__(self) -> str:
        return "global_process_set"


#: All ranks of the world.
global_process_set: ProcessSet = _GlobalProcessSet()


def check_process_set(process_set: object) -> None:
    """Checks an argument ``process_set``.

    Raises:
        TypeError: it is no process set.
    """
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"process_set={process_set!r} was found, a ProcessSet was expected; see add_process_set()")


def check(process_sets: Any) -> list[ProcessSet]:
    """Returns the process sets that ``init`` is asked for.

    Raises:
        ValueError: something else was given.
    """
    if process_sets is None or (isinstance(process_sets, str) and process_sets.lower() == "dynamic"):
        return []
    is_list = isinstance(process_sets, Iterable) and not isinstance(process_sets, str)
    if not is_list or not all(isinstance(one, ProcessSet) for one in process_sets):
        raise ValueError(
            f"process_sets={process_sets!r} was found, a list of ProcessSet, 'dynamic' or None was expected"
        )
    return list(process_sets)


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Registers a process set: all ranks of the world call it with the same ranks, and it returns when all have.

    Args:
        process_set: the set, or its ranks.

    Returns:
        The set, with its id.

    Raises:
        TypeError: the ranks are no whole numbers.
        ValueError: it is registered, or one with these ranks is, or a rank is none of the world's.
        MismatchError: the ranks gave different sets.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.process_set_id is not None:
        raise ValueError(f"{process_set!r} is registered already, one that is not was expected; use it as it is")
    world, engine = basics.world(), basics.engine()
    ranks = process_set.ranks or []
    number = Pending(
        engine,
        engine.add_process_set(ranks, False),
        lambda pending: engine.added_process_set(pending.handle),
        None,
    ).wait()
    world.process_sets[number] = list(ranks)
    process_set._registered = (world.generation, number)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Ends a process set: all ranks of the world call it, after the set's collectives have ended.

    Returns:
        False for the global set and for one that is not registered.

    Raises:
        TypeError: it is no process set.
        HorovodInternalError: a rank has joined, was lost or late.
    """
    check_process_set(process_set)
    number = process_set.process_set_id
    if not number:
        return False
    world, engine = basics.world(), basics.engine()
    Pending(engine, engine.remove_process_set(number, False), None, None).wait()
    del world.process_sets[number]
    process_set._registered = None
    return True
