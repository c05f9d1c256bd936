"""Properties of the order of samples."""

from __future__ import annotations

import numpy as np
import pytest

from sparkvod.data import order

CASES = {
    "even": [100] * 64,
    "one": [1],
    "ten": [10] * 10,
    "uneven": [1, 4096, 17, 0, 300, 2] * 30,
    "many": [4096] * 1000 + [13],
    "none": [],
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shuffle", [True, False])
def test_deal_gives_each_group_to_one_lane_and_evenly(name: str, shuffle: bool) -> None:
    rows = np.array(CASES[name], dtype=np.int64)
    lanes = order.deal(rows, 1, 2, shuffle)
    assert len(lanes) == order.LANES
    dealt = np.concatenate(lanes)
    assert sorted(dealt) == np.flatnonzero(rows).tolist()
    loads = np.array([rows[lane].sum() for lane in lanes])
    assert loads.max() - loads.min() <= 2 * rows.max(initial=0)
    for parts in (2, 4, 8, 16):
        shares = loads.reshape(parts, -1).sum(axis=1)
        assert shares.max() - shares.min() <= 2 * rows.max(initial=0)
    if not shuffle:
        assert all((np.diff(lane) > 0).all() for lane in lanes)


def test_deal_depends_on_seed_and_epoch_only() -> None:
    rows = np.full(100, 10)

    def dealt(seed: int, epoch: int) -> list[list[int]]:
        return [lane.tolist() for lane in order.deal(rows, seed, epoch, True)]

    assert dealt(1, 1) == dealt(1, 1)
    assert dealt(1, 1) != dealt(1, 2)
    assert dealt(1, 1) != dealt(2, 1)
    assert dealt(-5, 0) == dealt(-5, 0)


@pytest.mark.parametrize("seed", range(5))
def test_cuts_are_an_order(seed: int) -> None:
    random = np.random.default_rng(seed)
    lanes = random.integers(0, [1, 2, 50, 200, 9][seed] + 1, order.LANES)
    total = int(lanes.sum())
    counts = order.cuts(lanes, np.arange(total + 1))
    assert (counts[0] == 0).all()
    assert (counts[-1] == lanes).all()
    steps = np.diff(counts, axis=0)
    assert ((steps == 0) | (steps == 1)).all()
    assert (steps.sum(axis=1) == 1).all()


def test_cuts_follow_the_lanes_lengths() -> None:
    lanes = np.random.default_rng(0).integers(100, 200, order.LANES)
    total = int(lanes.sum())
    positions = np.arange(total + 1)
    ideal = positions[:, None] * lanes / total
    assert np.abs(order.cuts(lanes, positions) - ideal).max() <= 5


def test_cuts_of_more_rows_than_64_bits_can_multiply() -> None:
    lanes = np.full(order.LANES, 1 << 40)
    assert (order.cuts(lanes, np.array([1 << 44])) == 1 << 39).all()


@pytest.mark.parametrize("num_proc", [1, 2, 3, 5, 7, 31, 32, 33, 64, 100])
def test_share_splits_each_lane_between_its_ranks(num_proc: int) -> None:
    steps = 200
    counts = np.random.default_rng(num_proc).integers(0, 20, (steps, order.LANES))
    taken = np.zeros_like(counts)
    rows = []
    for rank in range(num_proc):
        lanes = order.lanes_of(rank, num_proc)
        assert len(lanes) <= -(-order.LANES // num_proc) + 1
        low, high = order.share(counts[:, lanes.start : lanes.stop], 10, rank, num_proc)
        assert (low <= high).all()
        np.testing.assert_array_equal(low[:, 0], taken[:, lanes.start])
        taken[:, lanes.start : lanes.stop] += high - low
        rows.append((high - low).sum())
    np.testing.assert_array_equal(taken, counts)
    assert max(rows) - min(rows) <= 0.35 * counts.sum() / num_proc
    if order.LANES % num_proc == 0:
        assert (low == 0).all()


def test_windows() -> None:
    sizes = np.array([10, 10, 10, 1, 1, 1, 1, 1])
    assert order.windows(sizes, 2, 0) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert order.windows(sizes, 2, 14) == [(0, 2), (2, 7), (7, 8)]
    assert order.windows(sizes[:0], 2, 10) == []


@pytest.mark.parametrize("rows", [0, 1, 2, 5, order.SORTED_ROWS, order.SORTED_ROWS + 1])
def test_permutations_are_permutations_and_depend_on_seed_and_path_only(rows: int) -> None:
    shuffler = order.Shuffler()
    first = shuffler.permutation(rows, 1, 2, 3)
    assert sorted(first.tolist()) == list(range(rows))
    others = [shuffler.permutation(rows, 2, 2, 3), shuffler.permutation(rows, 1, 2, 4)]
    if rows > 5:
        assert all((other != first).any() for other in others)
    assert (order.Shuffler().permutation(rows, 1, 2, 3) == first).all()


def test_every_permutation_is_as_likely_as_any_other() -> None:
    shuffler = order.Shuffler()
    found: dict[tuple[int, ...], int] = {}
    for path in range(6000):
        key = tuple(shuffler.permutation(3, 1, path).tolist())
        found[key] = found.get(key, 0) + 1
    assert len(found) == 6
    assert all(abs(count - 1000) < 150 for count in found.values())  # five standard deviations
