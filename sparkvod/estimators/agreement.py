"""Whether all ranks end, and whether they still train one model, asked where callbacks have run: one small sum.

A callback runs on each rank. What it does to the learning rate or to weights on one rank alone would go on unseen: each
rank applies the same gradients to other weights, and the driver takes rank 0's.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sparkvod import log
from sparkvod.core import basics
from sparkvod.estimators import sums
from sparkvod.estimators.adapter import Adapter

_LOG = log.get("estimators")

#: Beyond what ranks on unlike processors come to by rounding; measured by the norm of each tensor.
_TOLERANCE = 1e-3
_RATE_TOLERANCE = 1e-5
_MODULUS = (1 << 48) - 59  # a whole number that float64 holds, so that a sum with zeros is itself
_PROJECTIONS = 4
_SHOWN = 4


def reached(adapter: Adapter, asked_to_stop: bool, when: str) -> bool:
    """Returns whether a rank asked to stop; all ranks call it at the same point.

    Args:
        adapter: the model in training.
        asked_to_stop: whether this rank asks.
        when: where that is, for messages.

    Raises:
        ValueError: learning rates or weights differ among the ranks.
    """
    rank, size = basics.rank(), basics.size()
    if size == 1:
        return asked_to_stop
    said = np.zeros((2, size))
    said[:, rank] = adapter.learning_rate or 0.0, checksum(array for _, array in adapter.replicas())
    found = sums.across("sparkvod.stop", np.array([float(asked_to_stop), *said.ravel()]))
    rates, checksums = found[1:].reshape(2, size)
    problems = [_rates(rates)] if not np.allclose(rates, rates[0], _RATE_TOLERANCE, 0.0, equal_nan=True) else []
    if (checksums != checksums[0]).any():
        problems += _weights(adapter, rank, size, when)
    if problems:
        raise ValueError(
            f"{' and '.join(problems)} {when}: all ranks must hold the same, since each applies the same gradients to "
            "its own copy of the model. If a callback or train_minibatch_fn changes them, it must make the same "
            "change on all ranks, by the figures of an epoch's end, which are the same everywhere, not by those of a "
            "batch or by random numbers"
        )
    return bool(found[0])


def checksum(arrays: Iterable[np.ndarray]) -> float:
    """Returns a whole number below 2^48 that differs, but by chance, if a bit of an array does: 10 GB/s or so."""
    total = 0
    for array in arrays:
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        words = content[: len(content) // 8 * 8].view(np.uint64)
        rest = int.from_bytes(content[len(words) * 8 :].tobytes(), "little")
        total = (total * 1_000_003 + int(words.sum(dtype=np.uint64)) + rest) % _MODULUS
    return float(total)


def _rates(rates: np.ndarray) -> str:
    by_value: dict[str, list[int]] = {}
    for rank, rate in enumerate(rates.tolist()):
        by_value.setdefault(f"{rate:.6g}", []).append(rank)
    shown = [f"{value} on {_ranks(ranks)}" for value, ranks in list(by_value.items())[:_SHOWN]]
    return f"the learning rates {', '.join(shown)}"


def _weights(adapter: Adapter, rank: int, size: int, when: str) -> list[str]:
    """Returns what to say of weights that differ by more than rounding: all ranks call it when checksums differ."""
    replicas = list(adapter.replicas())
    mine = np.zeros((len(replicas), _PROJECTIONS + 1, size))
    for tensor, (_, array) in zip(mine, replicas, strict=True):
        tensor[:, rank] = _signature(array)
    every = sums.across("sparkvod.weights", mine.ravel()).reshape(mine.shape)
    finite = np.isfinite(every)
    every = np.where(finite, every, 0.0)
    scale = np.maximum(every[:, -1:].max(2, keepdims=True), np.finfo(np.float32).tiny)
    apart = np.where(finite == finite[:, :, :1], np.abs(every - every[:, :, :1]) / scale, 1.0).max(1)
    far = apart > _TOLERANCE
    if not far.any():
        if rank == 0:
            _LOG.warning("weights differ by rounding among the ranks %s (by %.1e of their norms)", when, apart.max())
        return []
    names = [name for (name, _), differs in zip(replicas, far.any(1), strict=True) if differs]
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    others = [int(other) for other in np.flatnonzero(far.any(0))]
    return [f"other weights on {_ranks(others)} than on rank 0 ({shown})"]


def _signature(array: np.ndarray) -> np.ndarray:
    """Returns a tensor's projections on random signs, and its norm."""
    flat = np.ascontiguousarray(array).reshape(-1)
    flat = (flat.view(flat.real.dtype) if np.iscomplexobj(flat) else flat).astype(np.float64)
    random = np.random.default_rng(0)
    projections = [flat @ np.resize(random.choice([-1.0, 1.0], 8191), len(flat)) for _ in range(_PROJECTIONS)]
    return np.array([*projections, np.linalg.norm(flat)])


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
