"""Names of operations that were given none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sparkvod.core import basics

T = TypeVar("T")


def now(kind: str, name: str | None, run: Callable[[str], T]) -> T:
    """Runs an operation that the caller waits for, under its own or a borrowed name."""
    if name is not None:
        return run(name)
    world = basics.world()
    borrowed = world.borrow_name(kind)
    try:
        return run(borrowed)
    finally:
        world.return_name(kind, borrowed)
