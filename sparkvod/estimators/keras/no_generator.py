"""For backends without a generator of their own: all of Keras draws from generators that are variables there."""

from __future__ import annotations

from typing import Any


def random_state() -> Any:
    """Returns nothing."""
    return None


def set_random_state(state: Any) -> None:
    """Takes what :func:`random_state` returned."""
