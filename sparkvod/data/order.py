"""The order of samples: pure functions from (data, seed, epoch) to who reads which row when.

The row groups are dealt to :data:`LANES` lanes. A lane is a sequence of rows: its groups one after the other, shuffled
inside windows of a few groups. The order of an epoch interleaves the lanes in proportion to their lengths, so that all
of them end together. A step takes the next ``batch_size * num_proc`` rows of that order, and rank r of n trains on
those that lie in its lanes ``[r*LANES/n, (r+1)*LANES/n)``. Nothing here depends on the number of ranks but the last
sentence, so the rows of a step do not either, as long as the global batch stays the same.

The lanes are the leaves of a binary tree, for the dealing and for the interleaving alike. That makes every subtree as
long as its sibling, give or take one group, and gives the ranks of a power-of-two world equal shares of each step,
give or take a row, because each of them owns a subtree.

With ``shuffle=False`` the groups are dealt in file order and no rows are shuffled: a step takes its rows from at most
LANES consecutive stretches of the data, which move through it from the beginning to the end.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

LANES = 32
_LEVELS = LANES.bit_length() - 1
SORTED_ROWS = 8192
"""Rows up to which they are shuffled by sorting, which is slower when they are many."""

Ints = NDArray[np.int64]


def generator(seed: int, *path: int) -> np.random.Generator:
    """Returns the random generator for one purpose: equal arguments, equal numbers, on every rank."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed % (1 << 63), *path])))


class Shuffler:
    """Makes permutations, each from a seed and a path of its own, without a new generator for each of them.

    The state of a PCG64 generator is set from a digest of seed and path: equal arguments, equal permutation, on every
    rank. (Seeding one by numpy's ``SeedSequence`` takes as long as it takes to shuffle a thousand rows.) Up to
    :data:`SORTED_ROWS` rows are sorted by random numbers of 16 bits, because numpy's radix sort takes a third of the
    time of its shuffle; of two rows with the same number, one pair in 65,536, the first stays the first.
    """

    def __init__(self) -> None:
        self._bits = np.random.PCG64(0)
        self._generator = np.random.Generator(self._bits)
        self._lock = threading.Lock()

    def permutation(self, rows: int, seed: int, *path: int) -> Ints:
        """Returns the numbers below ``rows`` in the order of this seed and path, [rows]; in any thread."""
        text = ",".join(map(str, (seed, *path))).encode()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=32).digest(), "little")
        state: Any = {
            "bit_generator": "PCG64",
            "state": {"state": number >> 128, "inc": number % (1 << 128) | 1},
            "has_uint32": 0,
            "uinteger": 0,
        }
        with self._lock:
            self._bits.state = state
            if rows > SORTED_ROWS:
                return self._generator.permutation(rows)
            keys = self._bits.random_raw(-(-rows // 4)).view(np.uint16)
        return keys[:rows].argsort(kind="stable")


def deal(rows: Ints, seed: int, epoch: int, shuffle: bool) -> list[Ints]:
    """Deals row groups to lanes so that the lanes' lengths differ as little as may be.

    The groups come in descending size (equal ones in random order) and each goes down the tree to the lighter side. A
    lane then reads its groups in random order. Without ``shuffle`` the groups come, and are read, in file order.
    Cost: O(groups * log(LANES)).

    Args:
        rows: rows of each group; groups without rows are dealt to nobody.
        seed: the job's seed.
        epoch: number of the epoch.
        shuffle: False: the same order in every epoch.

    Returns:
        For each lane the indices of its groups, in the order in which it reads them.
    """
    order = np.flatnonzero(rows)
    if shuffle:
        order = generator(seed, epoch, 0).permutation(order)
        order = order[np.argsort(-rows[order], kind="stable")]
    load = [0] * (2 * LANES)
    lanes: list[list[int]] = [[] for _ in range(LANES)]
    for group, size in zip(order.tolist(), rows[order].tolist(), strict=True):
        node = 1
        for _ in range(_LEVELS):
            node *= 2
            if load[node + 1] < load[node]:
                node += 1
            load[node] += size
        lanes[node - LANES].append(group)
    dealt = [np.array(lane, dtype=np.int64) for lane in lanes]
    if shuffle:
        random = generator(seed, epoch, 1)
        dealt = [random.permutation(lane) for lane in dealt]
    return dealt


def cuts(lane_rows: Ints, positions: Ints) -> NDArray[Any]:
    """Tells how many rows of each lane lie before given positions of the epoch's order.

    A node of the tree that has taken P of its N rows has taken ``P * N_left // N`` of its left child's: both children's
    counts grow by 0 or 1 as P does, so this defines an order, and it can be entered anywhere.

    Args:
        lane_rows: rows of each lane, [LANES].
        positions: positions in the order, [k], from 0 to the number of rows.

    Returns:
        Counts [k, LANES], of Python integers when 64 bits would not hold the products.
    """
    total = int(lane_rows.sum())
    dtype: type = np.int64 if total < 1 << 31 else object
    counts: NDArray[Any] = np.asarray(positions).astype(dtype)[:, None]
    for level in range(_LEVELS):
        sizes = lane_rows.reshape(2 << level, -1).sum(axis=1).astype(dtype)
        left, whole = sizes[0::2], np.maximum(sizes[0::2] + sizes[1::2], 1)
        taken = counts * left // whole
        counts = np.stack([taken, counts - taken], axis=2).reshape(len(counts), 2 << level)
    return counts.astype(np.int64)


def lanes_of(rank: int, num_proc: int) -> range:
    """Returns the lanes of a rank; the first and the last may be shared with neighbours."""
    return range(rank * LANES // num_proc, -((rank + 1) * LANES // -num_proc))


def share(counts: Ints, first_step: int, rank: int, num_proc: int) -> tuple[Ints, Ints]:
    """Splits each step's rows of each lane of a rank between the ranks that share the lane.

    Lane l is the interval [l*n, (l+1)*n) and rank r owns [r*LANES, (r+1)*LANES) of the same line, so r's part of the
    lane is a fraction ``[low, high)``. Of the c rows of a step it takes those from ``c*low`` to ``c*high``, rounded
    with a dither that depends on step and lane only: neighbours agree on the border, and nobody is rounded down for
    ever.

    Args:
        counts: rows of each step and each lane of :func:`lanes_of`, [steps, lanes].
        first_step: number of the first of these steps in the epoch.
        rank: the rank.
        num_proc: number of ranks.

    Returns:
        ``(low, high)``, both [steps, lanes]: the rank takes rows low to high (exclusive) of the lane's rows in the
        step.
    """
    lanes = np.array(lanes_of(rank, num_proc), dtype=np.int64)
    steps = first_step + np.arange(len(counts), dtype=np.int64)
    dither = (steps[:, None] * 2654435761 + lanes[None, :] * 40503) % (1 << 31) * num_proc >> 31
    low = np.clip(rank * LANES - lanes * num_proc, 0, num_proc)
    high = np.clip((rank + 1) * LANES - lanes * num_proc, 0, num_proc)
    return (counts * low + dither) // num_proc, (counts * high + dither) // num_proc


def windows(nbytes: Ints, groups: int, small: int) -> list[tuple[int, int]]:
    """Cuts a lane's sequence of pieces into windows, inside which rows are shuffled.

    A window takes ``groups`` pieces, or more as long as all of them together have at most ``small`` bytes.

    Args:
        nbytes: decoded bytes of each piece.
        groups: pieces that may be held regardless of their size.
        small: bytes under which more may be held.

    Returns:
        ``(first, end)`` of each window, indices of pieces.
    """
    result: list[tuple[int, int]] = []
    first, held = 0, 0
    for index, size in enumerate(nbytes.tolist()):
        if index > first and index - first >= groups and held + size > small:
            result.append((first, index))
            first, held = index, 0
        held += size
    if len(nbytes):
        result.append((first, len(nbytes)))
    return result
