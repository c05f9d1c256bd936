"""Names of operations that were given none. Each process set has its own, since its ranks count without the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sparkvod.core import basics

T = TypeVar("T")


def in_set(kind: str, process_set: int) -> str:
    """Returns the kind under which a process set, given by its number, counts and borrows names."""
    return kind if process_set == 0 else f"{kind}.set{process_set}"


def new_name(kind: str, process_set: int) -> str:
    """Returns a name that no operation of the set had."""
    return basics.world().new_name(in_set(kind, process_set))


def now(kind: str, name: str | None, run: Callable[[str], T], process_set: int) -> T:
    """Runs an operation that the caller waits for, under its own or a borrowed name."""
    if name is not None:
        return run(name)
    world = basics.world()
    kind = in_set(kind, process_set)
    borrowed = world.borrow_name(kind)
    try:
        return run(borrowed)
    finally:
        world.return_name(kind, borrowed)
