"""An engine alone in its world, for tests of what sits on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sparkvod import config
from sparkvod._native import Engine


@contextmanager
def lone_engine() -> Iterator[Engine]:
    """Yields a connected engine of one rank."""
    engine = Engine(config.engine_config())
    engine.connect(0, [engine.listen()], b"secret of a test, long enough to be one")
    try:
        yield engine
    finally:
        engine.shutdown()
