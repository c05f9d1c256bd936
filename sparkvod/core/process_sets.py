"""Sets of ranks. Only the global set is there; the class is what the peer's scripts name in their arguments."""

from __future__ import annotations

from collections.abc import Iterable

from sparkvod.core import basics


class ProcessSet:
    """A set of ranks that runs collectives of its own.

    Args:
        ranks_or_comm: the ranks, in any order.

    Attributes:
        process_set_id: 0 for the global set, None for a set that is not registered.
        ranks: the sorted ranks; None for the global set before ``init``.
    """

    process_set_id: int | None = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        self._ranks = sorted({int(rank) for rank in ranks_or_comm})

    @property
    def ranks(self) -> list[int] | None:
        """The sorted ranks."""
        return self._ranks

    def size(self) -> int | None:
        """Returns the number of ranks, None if the set is not registered."""
        return None if self.process_set_id is None else len(self.ranks or ())

    def rank(self) -> int | None:
        """Returns this process's rank within the set, None if the set is not registered."""
        return None

    def included(self) -> bool | None:
        """Returns whether this process is in the set, None if the set is not registered."""
        return None

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
    process_set_id = 0

    def __init__(self) -> None:
        super().__init__(())

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
global_process_set = _GlobalProcessSet()
