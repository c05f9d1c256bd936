"""Codes, names and argument checks of the collectives."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from typing import SupportsFloat, SupportsIndex

from sparkvod.core import basics
from sparkvod.core.process_sets import ProcessSet, check_process_set, global_process_set

Average, Sum, Adasum, Min, Max, Product = range(6)

OP_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
_REDUCE = (Average, Sum, Adasum, Min, Max, Product)
_SCATTER = (Average, Sum, Min, Max, Product)
_GRADIENTS = (Average, Sum)

#: Names of the element types; a type's place is its code in the engine.
DTYPES = (
    "uint8",
    "int8",
    "uint16",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "bool",
)
CODES = {name: code for code, name in enumerate(DTYPES)}
ITEMSIZES = (1, 1, 2, 2, 4, 8, 2, 2, 4, 8, 1)


def reduce_op(op: int | None, average: bool | None = None, supported: Sequence[int] = _GRADIENTS) -> int:
    """Returns the reduce operation that arguments ask for; by default one that gradients can be reduced by.

    Args:
        op: one of the constants, None for Average.
        average: the peer's deprecated way to say Average (True) or Sum (False).
        supported: the operations that the collective has.

    Raises:
        ValueError: both were given, or the operation is unknown or not supported.
    """
    if average is not None:
        if op is not None:
            raise ValueError(
                f"op={op!r} and average={average!r} were found, one of them was expected; leave out average"
            )
        warnings.warn("average= is deprecated, use op=Average or op=Sum", DeprecationWarning, stacklevel=4)
        return Average if average else Sum
    if op is None or op == Average:
        return Average
    if op in supported:
        return op
    names = " or ".join(OP_NAMES[code] for code in supported)
    found = OP_NAMES[op] if isinstance(op, int) and 0 <= op < len(OP_NAMES) else repr(op)
    raise ValueError(f"op={found} was found, {names} was expected; use one of these")


def allreduce_op(op: int | None, average: bool | None = None) -> int:
    """Returns the operation that the arguments of an allreduce ask for, as :func:`reduce_op` does."""
    return reduce_op(op, average, _REDUCE)


def reducescatter_op(op: int | None) -> int:
    """Returns the operation that the arguments of a reducescatter ask for, as :func:`reduce_op` does."""
    return reduce_op(op, None, _SCATTER)


def set_id(process_set: ProcessSet) -> int:
    """Returns the engine's number of a process set.

    Raises:
        TypeError: it is no process set.
        ValueError: it is not registered in this world.
    """
    if process_set is global_process_set:
        return 0
    check_process_set(process_set)
    found = process_set.process_set_id
    if found is not None:
        return found
    if process_set == global_process_set:
        return 0
    raise ValueError(
        f"process_set={process_set!r} was found, one of this world was expected; register it by add_process_set() "
        "or init(process_sets=...)"
    )


def own_set_id(process_set: ProcessSet, what: str) -> int:
    """Returns the engine's number of a process set that this rank is in.

    Args:
        process_set: the set.
        what: what is asked for, for the message.

    Raises:
        TypeError: it is no process set.
        ValueError: it is not registered in this world, or this rank is none of its.
    """
    number = set_id(process_set)
    if number != 0 and not process_set.included():
        raise ValueError(
            f"{what} was asked for on rank {basics.rank()} with the process set of the ranks {process_set.ranks}, a "
            f"rank of the set was expected; call it on these ranks only, as where process_set.included()"
        )
    return number


def check_root(root_rank: int, size: int, ranks: Sequence[int] | None = None) -> None:
    """Checks the root of a broadcast.

    Args:
        root_rank: a rank of the world.
        size: number of ranks in the world.
        ranks: the ranks that take part, all when None.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is no rank of the world, or of those that take part.
    """
    if not isinstance(root_rank, SupportsIndex):
        raise TypeError(f"root_rank={root_rank!r} was found, a rank from 0 to {size - 1} was expected")
    if not 0 <= operator.index(root_rank) < size:
        raise ValueError(f"root_rank={root_rank} was found, a rank from 0 to {size - 1} was expected")
    if ranks is not None and root_rank not in ranks:
        raise ValueError(
            f"root_rank={root_rank} was found, one of the process set's ranks {list(ranks)} was expected; give the "
            "root by its rank in the world"
        )


def check_name(name: object) -> None:
    """Checks the name of a collective.

    Raises:
        TypeError: it is no string.
        ValueError: it has characters that UTF-8 cannot encode.
    """
    if not isinstance(name, str):
        raise TypeError(f"name={name!r} was found, a string, the same on all ranks, was expected")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"name={name!r} was found, text that UTF-8 can encode was expected; leave out {name[error.start]!r}"
        ) from None


def check_scales(*scales: object) -> None:
    """Checks the factors before and after a reduction.

    Raises:
        TypeError: one is no number.
    """
    for what, scale in zip(("prescale_factor", "postscale_factor"), scales, strict=False):
        if not isinstance(scale, (SupportsFloat, SupportsIndex)):
            raise TypeError(f"{what}={scale!r} was found, a number was expected")


def explained(error: TypeError, name: object, *scales: object) -> Exception:
    """Returns what to raise when the engine cannot take arguments: words about the one that is wrong.

    Looked at afterwards only, so that right arguments pay nothing.

    Args:
        error: the engine's error, returned when no argument known here is wrong.
        name: the collective's name.
        *scales: the factors before and after the reduction.
    """
    try:
        check_name(name)
        check_scales(*scales)
    except (TypeError, ValueError) as better:
        return better
    return error


def check_differentiable(op: int, remedy: str) -> None:
    """Checks the op of a reduction whose gradient is asked for; ``remedy`` says how the framework does without.

    Raises:
        ValueError: it is neither ``Average`` nor ``Sum``.
    """
    if op not in _GRADIENTS:
        raise ValueError(
            f"the gradient of a reduction with op={OP_NAMES[op]} was asked for, Average or Sum was expected; {remedy}"
        )


def check_rows(dims: int | None, what: str, remedy: str) -> None:
    """Checks that a tensor of ``dims`` dimensions (None: not known yet) has rows; ``remedy`` gives it some.

    Raises:
        ValueError: it is a scalar.
    """
    if dims == 0:
        raise ValueError(f"{what} of a scalar was found, at least one dimension was expected; {remedy}")


def check_distinct(places: Sequence[tuple[int, int]], name: str) -> None:
    """Checks that no memory is reduced twice in one operation in place, which would depend on the algorithm.

    Args:
        places: address and number of elements of each tensor.
        name: the operation's name.

    Raises:
        ValueError: two tensors begin at the same address.
    """
    addresses = [address for address, count in places if count]
    if len(set(addresses)) < len(addresses):
        raise ValueError(
            f"the same tensor was found twice in '{name}', distinct ones were expected; pass each once, or use the "
            "form that returns new tensors"
        )
