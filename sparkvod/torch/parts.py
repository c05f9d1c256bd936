"""The gradients of one optimizer in parts: those of its first parameters, and a part each time that some were added."""

from __future__ import annotations

from collections.abc import Sequence

from sparkvod.core.agreement import Description
from sparkvod.torch.gradients import Gradients, Kept


class Parts:
    """Gradients in parts, of which those may be sent that the ranks have agreed on.

    A part that was not yet released keeps what it takes. While there is one, or something else to agree on, what the
    others send says so, and all ranks hear of it in the same step.
    """

    def __init__(self) -> None:
        self._parts: list[Gradients] = []
        self._released = 0
        self._places: list[tuple[Gradients, int]] = []

    def add(self, part: Gradients, count: int) -> None:
        """Adds a part with the gradients of ``count`` parameters behind the others."""
        self._parts.append(part)
        self._places += [(part, index) for index in range(count)]

    @property
    def begun(self) -> bool:
        """Whether a gradient was taken that is not yet reduced."""
        return any(part.begun for part in self._parts)

    @property
    def agreed(self) -> bool:
        """Whether all parts are released."""
        return self._released == len(self._parts)

    @property
    def carries(self) -> bool:
        """Whether anything is sent that can say that a rank has news."""
        carriers = self._parts[: self._released]
        return any(part in carriers for part, _ in self._places)

    @property
    def heard(self) -> bool:
        """Whether, in the last :meth:`reduce`, any rank had news."""
        return any(part.heard for part in self._parts[: self._released])

    def announce(self, news: bool) -> None:
        """Sets whether what is sent from now on says that this rank has news."""
        for part in self._parts[: self._released]:
            part.announce = news

    def fits(self) -> bool:
        """Returns whether the parameters still have the dtypes that were planned for."""
        return all(part.fits() for part in self._parts)

    def description(self) -> Description:
        """Returns what the ranks must have in common, of all parts."""
        each = [part.description() for part in self._parts]
        first = 0
        buckets: list[tuple[int, ...]] = []
        for description in each:
            buckets += [tuple(first + index for index in bucket) for bucket in description.buckets]
            first += len(description.parameters)
        return Description(
            parameters=tuple(parameter for description in each for parameter in description.parameters),
            options=each[0].options,
            buckets=tuple(buckets),
            knobs=each[0].knobs,
        )

    def take(self, index: int) -> None:
        """Takes the complete gradient of a parameter."""
        part, place = self._places[index]
        part.take(place)

    def reduce(self) -> list[str]:
        """Reduces the parts that are released; returns the names of the gradients that were changed on their way."""
        return _reduced(self._parts[: self._released])

    def release_and_reduce(self, prefix: str) -> list[str]:
        """Lets all parts be sent and reduces those that could not be before, as :meth:`reduce` does."""
        added = self._parts[self._released :]
        for part in added:
            part.release(prefix)
        self._released = len(self._parts)
        return _reduced(added)

    def drain(self) -> None:
        """Waits for what was started and forgets it."""
        for part in self._parts:
            part.drain()

    def give_back(self) -> None:
        """Gives the parameters back the gradients that were on their way, as they are."""
        for part in self._parts:
            part.give_back()

    def keep(self, kept: Kept) -> None:
        """Adds copies of what is kept for the next step."""
        for part in self._parts:
            part.keep(kept)

    def restore(self, kept: Kept) -> None:
        """Takes what was kept; what it knows nothing of is as in the beginning."""
        for part in self._parts:
            part.restore(kept)


def _reduced(parts: Sequence[Gradients]) -> list[str]:
    return [name for part in parts for name in part.reduce()]
