"""Ranks whose callbacks made different models of one are told apart; what is rounding is not."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import sparkvod
from sparkvod.estimators import agreement


class Weights:
    """What is asked of an adapter."""

    def __init__(self, rate: float | None, *arrays: np.ndarray) -> None:
        self.learning_rate, self._arrays = rate, arrays

    def replicas(self) -> Any:
        return ((f"w{k}", array) for k, array in enumerate(self._arrays))


def on_a_rank() -> dict[str, Any]:
    """Returns, by case, whether to stop or what was raised."""
    import logging

    from sparkvod.core import basics

    basics.init()
    rank = basics.rank()
    a, b = np.linspace(-1, 1, 1001, dtype="float32"), np.arange(7, dtype="int64")
    halves = np.ones(5, "float16")
    zeroed, rounded, moved = a * (rank != 2), a * (1 + 1e-6 * (rank == 1)), a.copy()
    moved[3] += 0.5 * (rank == 1)
    broken = np.where(np.arange(3) == rank - 1, np.nan, 1.0)
    everywhere = np.array([np.nan, np.inf])
    cases: dict[str, tuple[bool, Weights]] = {
        "same": (False, Weights(0.1, a, b, halves)),
        "stop": (rank == 1, Weights(None, a)),
        "rate": (False, Weights(0.1 if rank else 0.05, a)),
        "no rate": (False, Weights(np.nan, a)),
        "zeroed": (False, Weights(0.1, b, zeroed)),
        "moved": (False, Weights(0.1 * (rank + 1), a, moved)),
        "rounded": (False, Weights(0.1, a, rounded)),
        "broken": (False, Weights(0.1, broken)),
        "broken everywhere": (False, Weights(0.1, everywhere)),
    }
    warned: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warned.append(record.getMessage())

    agreement._LOG.addHandler(Keep())
    found: dict[str, Any] = {}
    for name, (asked, adapter) in cases.items():
        try:
            found[name] = agreement.reached(adapter, asked, "after epoch 4")  # type: ignore[arg-type]
        except ValueError as error:
            found[name] = str(error)
    return found | {"warned": warned}


@pytest.mark.timeout(90)
def test_what_differs_among_ranks_is_named() -> None:
    first, *others = sparkvod.run_local(on_a_rank, np=3, verbose=0, timeout=60)
    assert len(first.pop("warned")) == 1
    for other in others:
        assert other.pop("warned") == []
        assert other == first
    assert first["rate"].startswith(
        "the learning rates 0.05 on rank 0, 0.1 on ranks 1, 2 after epoch 4: all ranks must"
    )
    assert first["zeroed"].startswith("other weights on rank 2 than on rank 0 (w1) after epoch 4")
    assert "0.3 on rank 2 and other weights on rank 1 than on rank 0 (w1)" in first["moved"]
    assert first["broken"].startswith("other weights on ranks 1, 2 than on rank 0 (w0)")
    kept = {name: found for name, found in first.items() if not isinstance(found, str)}
    expected = {"same": False, "stop": True, "no rate": False, "rounded": False, "broken everywhere": False}
    assert kept == expected


def test_a_checksum_is_quick_and_sees_a_bit() -> None:
    large, small = np.ones(1 << 22, "float32"), np.arange(3, dtype="uint8")
    before = agreement.checksum([large, small])
    assert before == agreement.checksum([large.copy(), small.copy()])
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        agreement.checksum([large])
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.1  # 16 MiB; 2 ms on an idle core
    small[2] ^= 1
    assert agreement.checksum([large, small]) != before
    assert agreement.checksum([np.zeros(0, "float32")]) == agreement.checksum([np.float32(0)])
    assert agreement.checksum([np.ones((2, 3)).T]) == agreement.checksum([np.ones((3, 2))])
