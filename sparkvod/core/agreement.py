"""What the ranks' optimizers must have in common before gradients are exchanged, and who differs when they do not.

Buckets of different models may well have the same size, and would then be summed without a word. So before its first
exchange, and after parameters were added, each rank's description is compared: by digest, one small all-gather, and in
full only to say what differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparkvod.core.objects import allgather_object, objects_by_rank
from sparkvod.core.process_sets import ProcessSet, global_process_set
from sparkvod.errors import MismatchError

_ADVICE = (
    "the same model, with its parameters in the same order, and the same options were expected on all ranks; build "
    "them alike (broadcast_parameters makes values equal, not shapes or names)"
)


@dataclass(frozen=True)
class Description:
    """What one rank would exchange.

    Attributes:
        parameters: of each trained parameter name, shape and dtype, in order.
        options: name and value of what else must be equal, as text.
        buckets: indices of the parameters in each bucket, empty when they are exchanged one by one.
        knobs: environment variables and values that decide on the buckets; compared only to explain these.
    """

    parameters: tuple[tuple[str, tuple[int, ...], str], ...]
    options: tuple[tuple[str, str], ...]
    buckets: tuple[tuple[int, ...], ...]
    knobs: tuple[tuple[str, str], ...]

    def digest(self) -> bytes:
        """Returns 32 bytes that are equal for descriptions that may be exchanged with each other."""
        return hashlib.sha256(repr((self.parameters, self.options, self.buckets)).encode(errors="replace")).digest()


def agree(name: str, description: Description, process_set: ProcessSet = global_process_set) -> None:
    """Compares the ranks' descriptions; a collective.

    Args:
        name: name of the operation, the same on all ranks.
        description: this rank's.
        process_set: the ranks that exchange, of which this is one.

    Raises:
        MismatchError: they differ; the message, the same on all ranks, names the first difference.
        HorovodInternalError: a rank was lost or late.
    """
    if len(set(allgather_object(description.digest(), f"{name}.digest", process_set))) == 1:
        return
    by_rank = objects_by_rank(description, f"{name}.difference", process_set)
    found = difference(list(by_rank.values()), list(by_rank))
    raise MismatchError(f"the ranks' DistributedOptimizers differ: {found}; {_ADVICE}")


def difference(descriptions: Sequence[Description], ranks: Sequence[int] | None = None) -> str:
    """Returns the first difference between the ranks' descriptions, given in rank order, as text.

    ``ranks`` are the ranks that gave them, 0, 1, … when None.
    """
    ranks = range(len(descriptions)) if ranks is None else ranks
    for index in range(max(len(each.parameters) for each in descriptions)):
        found = [_parameter(each, index) for each in descriptions]
        if len(set(found)) > 1:
            return f"parameter {index}: {_who(found, ranks)}"
    for number, (option, _) in enumerate(descriptions[0].options):
        found = [each.options[number][1] for each in descriptions]
        if len(set(found)) > 1:
            return f"{option}: {_who(found, ranks)}"
    for number, (variable, _) in enumerate(descriptions[0].knobs):
        found = [each.knobs[number][1] for each in descriptions]
        if len(set(found)) > 1:
            return f"{variable}: {_who(found, ranks)}"
    for number in range(max(len(each.buckets) for each in descriptions)):
        found = [_bucket(each, number) for each in descriptions]
        if len(set(found)) > 1:
            return f"bucket {number} (see groups=): {_who(found, ranks)}"
    return "in what could not be told"


def _parameter(description: Description, index: int) -> str:
    if index >= len(description.parameters):
        return "none"
    name, shape, dtype = description.parameters[index]
    return f"{name!r} {list(shape)} {dtype}"


def _bucket(description: Description, number: int) -> str:
    if number >= len(description.buckets):
        return "none"
    indices = description.buckets[number]
    shown = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
    return f"{len(indices)} parameters ({shown})"


def _who(found: Sequence[Any], in_order: Sequence[int]) -> str:
    # "ranks 0,2 have this, rank 1 has that"
    ranks: dict[Any, list[int]] = {}
    for rank, value in zip(in_order, found, strict=True):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"rank{'s' * (len(who) > 1)} {','.join(map(str, who))} {'have' if len(who) > 1 else 'has'} {value}"
        for value, who in ranks.items()
    )
