"""What every front end promises of the collectives that move rows: a part of the contract in ``front_end``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparkvod.errors import MismatchError


def share(values: np.ndarray, rank: int, size: int) -> np.ndarray:
    """Returns the rows that a rank gets: the first ``n % size`` ranks have one more."""
    return np.array_split(values, size)[rank]


def check_reducescatter(front: Any) -> None:
    hvd = front.hvd
    rank, n = hvd.rank(), hvd.size()
    for dtype in ("float32", "float64", "bfloat16", "int64", "int32", "uint8"):
        for shape in ((0,), (1,), (7,), (n, 3), (5, 2, 2), (4001, 30)):
            by_rank = [np.arange(np.prod(shape)).reshape(shape) % 7 + r for r in range(n)]
            tensor = front.tensor(by_rank[rank], dtype)
            summed = hvd.reducescatter(tensor, op=hvd.Sum)
            np.testing.assert_array_equal(front.values(summed), share(sum(by_rank), rank, n))
            assert front.dtype(summed) == dtype
            largest = hvd.reducescatter(tensor, op=hvd.Max, name="largest")
            np.testing.assert_array_equal(front.values(largest), share(np.maximum.reduce(by_rank), rank, n))
            if "float" in dtype:
                mean = hvd.reducescatter(tensor, prescale_factor=2.0, postscale_factor=0.5)
                np.testing.assert_allclose(front.values(mean), share(sum(by_rank) / n, rank, n), rtol=0.01)
    group = [front.tensor(np.arange(5.0), "float32"), front.tensor(np.ones((3, 2)), "int32")]
    first, second = hvd.grouped_reducescatter(group, op=hvd.Sum)
    np.testing.assert_array_equal(front.values(first), share(np.arange(5.0) * n, rank, n))
    np.testing.assert_array_equal(front.values(second), share(np.full((3, 2), n), rank, n))
    if front.handles:
        handle = hvd.grouped_reducescatter_async(group, op=hvd.Sum)
        single = hvd.reducescatter_async(group[0])
        np.testing.assert_array_equal(front.values(hvd.synchronize(handle)[1]), share(np.full((3, 2), n), rank, n))
        np.testing.assert_allclose(front.values(hvd.synchronize(single)), share(np.arange(5.0), rank, n), rtol=1e-6)
    halves = hvd.reducescatter(group[0], op=hvd.Sum, compression=hvd.Compression.fp16)
    assert front.dtype(halves) == "float32"
    with pytest.raises(ValueError, match="scalar"):
        hvd.reducescatter(front.tensor(1.0, "float32"))
    with pytest.raises(ValueError, match="op=Adasum"):
        hvd.reducescatter(group[0], op=hvd.Adasum)


def check_alltoall(front: Any) -> None:
    hvd = front.hvd
    rank, n = hvd.rank(), hvd.size()
    for dtype in ("float32", "bfloat16", "int64", "uint8", "bool"):
        for width in ((), (3,), (0,), (40, 5)):
            sent = [[(q + 2 * r) % 3 for r in range(n)] for q in range(n)]
            rows = [np.arange(sum(counts)) for counts in sent]
            values = [
                np.broadcast_to((q + i.reshape(-1, *(1,) * len(width))) % 2, (len(i), *width))
                for q, i in enumerate(rows)
            ]
            received, counts = hvd.alltoall(front.tensor(values[rank], dtype), sent[rank])
            assert list(front.values(counts)) == [sent[q][rank] for q in range(n)]
            begins = [sum(sent[q][:rank]) for q in range(n)]
            expected = np.concatenate([values[q][begins[q] : begins[q] + sent[q][rank]] for q in range(n)])
            np.testing.assert_array_equal(front.values(received), expected)
            assert front.dtype(received) == dtype
    mine = front.tensor(np.arange(2 * n) + 100 * rank, "int64")
    expected = np.concatenate([np.arange(2 * rank, 2 * rank + 2) + 100 * q for q in range(n)])
    np.testing.assert_array_equal(front.values(hvd.alltoall(mine, name="equal")), expected)
    splits = front.tensor([2] * n, "int32")
    if front.handles:
        np.testing.assert_array_equal(front.values(hvd.synchronize(hvd.alltoall_async(mine))), expected)
        received, counts = hvd.synchronize(hvd.alltoall_async(mine, splits))
    else:
        received, counts = hvd.alltoall(mine, splits)
    np.testing.assert_array_equal(front.values(received), expected)
    assert list(front.values(counts)) == [2] * n
    for wrong in ([1] * (n + 1), [3] * n, [-1] * n, front.tensor([1.0] * n, "float32")):
        with pytest.raises(ValueError, match="split"):
            hvd.alltoall(mine, wrong)
    if n > 1:
        with pytest.raises(ValueError, match="splits"):
            hvd.alltoall(front.tensor(np.zeros(2 * n + 1), "float32"))
    with pytest.raises(ValueError, match="scalar"):
        hvd.alltoall(front.tensor(1.0, "float32"))


def check_grouped_allgather(front: Any) -> None:
    hvd = front.hvd
    rank, n = hvd.rank(), hvd.size()
    group = [front.tensor(np.full((rank, 2), rank), "float32"), front.tensor(rank, "int64")]
    for _ in range(2):
        first, second = hvd.grouped_allgather(group)
        np.testing.assert_array_equal(front.values(first)[:, 0], np.repeat(np.arange(n), np.arange(n)))
        np.testing.assert_array_equal(front.values(second), np.arange(n))
    if front.handles:
        first, _ = hvd.synchronize(hvd.grouped_allgather_async(group, name="group"))
        assert front.values(first).shape == (n * (n - 1) // 2, 2)


def check_exchanges_that_disagree(front: Any) -> None:
    hvd = front.hvd
    if hvd.size() == 1:
        return
    odd = hvd.rank() == 1
    rows = 2 * hvd.size()
    for mine in (
        lambda: hvd.reducescatter(front.tensor(np.zeros(rows + odd), "float32"), name="disagree.rows"),
        lambda: hvd.reducescatter(front.tensor(np.zeros(4), "int32" if odd else "float32"), name="disagree.dtype"),
        lambda: hvd.alltoall(front.tensor(np.zeros((rows, 3 if odd else 2)), "float32"), name="disagree.columns"),
        lambda: (hvd.reducescatter if odd else hvd.allreduce)(front.tensor(np.zeros(4), "float32"), name="disagree.op"),
    ):
        with pytest.raises(MismatchError, match=r"disagree\..*rank 1 sent"):
            mine()
    assert front.values(hvd.allreduce(front.tensor([1.0], "float32"), op=hvd.Sum))[0] == hvd.size()


def check_gradients_of_exchanges(front: Any) -> None:
    hvd = front.hvd
    rank, n = hvd.rank(), hvd.size()
    values = np.ones((n + 1, 2), dtype=np.float32)
    # Each rank's loss is (rank + 1) * the sum of the result.
    weights = np.concatenate([np.full(len(rows), r + 1.0) for r, rows in enumerate(np.array_split(values, n))])
    (grad,) = front.gradients(lambda x: (hvd.reducescatter(x) * (rank + 1.0)).sum(), [values])
    np.testing.assert_allclose(grad, np.repeat(weights[:, None], 2, axis=1))
    (grad,) = front.gradients(lambda x: (hvd.reducescatter(x, op=hvd.Sum) * (rank + 1.0)).sum(), [values])
    np.testing.assert_allclose(grad, n * np.repeat(weights[:, None], 2, axis=1))
    (grad,) = front.gradients(lambda x: (hvd.alltoall(x, [1] * n)[0] * (rank + 1.0)).sum(), [values])
    np.testing.assert_allclose(grad[:, 0], [*(np.arange(n) + 1.0), 0.0])
    rows = np.ones((rank + 1, 2), dtype=np.float32)
    (grad,) = front.gradients(lambda x: (hvd.grouped_allgather([x])[0] * (rank + 1.0)).sum(), [rows])
    np.testing.assert_allclose(grad, np.full((rank + 1, 2), (n + 1) / 2), rtol=1e-6)


def _check_the_rest(front: Any, mine: Any, left: np.ndarray, divisor: int, step: int) -> None:
    """Averages of every kind, groups, Adasum, factors and nothing at all, with the ranks that are left."""
    hvd, rank, n, mean = front.hvd, front.hvd.rank(), front.hvd.size(), left.sum() / divisor
    share = np.full(len(np.array_split(np.arange(4), n)[rank]), mean)
    np.testing.assert_allclose(front.values(hvd.reducescatter(mine)), share, rtol=1e-6)
    reduced = [*hvd.grouped_allreduce([mine, mine]), *hvd.grouped_reducescatter([mine, mine])]
    for each, size in zip(reduced, (4, 4, len(share), len(share)), strict=True):
        np.testing.assert_allclose(front.values(each), np.full(size, mean), rtol=1e-6)
    whole = front.tensor([-7, 7], "int64")
    np.testing.assert_array_equal(front.values(hvd.allreduce(whole)), np.trunc(np.array([-7, 7]) * len(left) / divisor))
    same = front.tensor([1.0, 2.0], "float32")
    np.testing.assert_allclose(front.values(hvd.allreduce(same, op=hvd.Adasum)), [1.0, 2.0], rtol=1e-6)
    assert front.values(hvd.allreduce(mine, op=hvd.Max, prescale_factor=-1.0))[0] == -(step + 1)
    assert front.values(hvd.allreduce(front.tensor(np.zeros(0), "float32"))).shape == (0,)
    assert hvd.allgather_object({"of": rank}) == [{"of": r} for r in range(step, n)]
    assert hvd.broadcast_object(rank, n - 1) == n - 1


def check_join(front: Any) -> None:
    hvd = front.hvd
    rank, n = hvd.rank(), hvd.size()
    mine = front.tensor(np.full(4, rank + 1.0), "float32")
    for average_over in ("all", "active"):
        # Rank r takes r + 1 steps; in step s the ranks from s on are left.
        for step in range(rank + 1):
            left = np.arange(step, n) + 1.0
            assert front.values(hvd.allreduce(mine, op=hvd.Sum))[0] == left.sum()
            divisor = n if average_over == "all" else n - step
            np.testing.assert_allclose(front.values(hvd.allreduce(mine))[0], left.sum() / divisor, rtol=1e-6)
            assert front.values(hvd.allreduce(mine, op=hvd.Min))[0] == step + 1
            np.testing.assert_array_equal(front.values(hvd.allgather(mine)), np.repeat(left, 4))
            assert len(front.values(hvd.grouped_allgather([mine, mine])[1])) == 4 * len(left)
            assert (front.values(hvd.reducescatter(mine, op=hvd.Sum)) == left.sum()).all()
            if front.handles:
                _check_the_rest(front, mine, left, divisor, step)
            assert front.values(hvd.broadcast(mine, n - 1))[0] == n
            received, _ = hvd.alltoall(mine, [0] * step + [1] * (n - step) if n - step <= 4 else [0] * n)
            np.testing.assert_array_equal(front.values(received), left)
            hvd.barrier()
        assert hvd.join(average_over=average_over) == n - 1
    if n > 1:
        if rank > 0:
            with pytest.raises(MismatchError, match="root 0, but rank 0 has joined"):
                hvd.broadcast(mine, 0)
        hvd.join()
    with pytest.raises(ValueError, match="average_over='some'"):
        hvd.join(average_over="some")
    assert front.values(hvd.allreduce(mine, op=hvd.Sum))[0] == n * (n + 1) / 2


def _check_started(front: Any, members: Any, mine: Any, theirs: np.ndarray) -> None:
    """Every collective that gives a handle takes the set: other ranks would be missing, or change the result."""
    hvd, n = front.hvd, len(theirs)
    rows = np.full(4 // n, theirs.sum())

    def ended(start: Any, *args: Any, **kwargs: Any) -> Any:
        return hvd.synchronize(start(*args, process_set=members, **kwargs))

    np.testing.assert_array_equal(front.values(ended(hvd.allgather_async, mine)), np.repeat(theirs, 4))
    np.testing.assert_array_equal(front.values(ended(hvd.broadcast_async, mine, members.ranks[-1])), [theirs[-1]] * 4)
    np.testing.assert_array_equal(front.values(ended(hvd.reducescatter_async, mine, op=hvd.Sum)), rows)
    received, _ = ended(hvd.alltoall_async, mine, [1] * n)
    np.testing.assert_array_equal(front.values(received), theirs)
    for summed in ended(hvd.grouped_allreduce_async, [mine, mine], op=hvd.Sum):
        np.testing.assert_array_equal(front.values(summed), [theirs.sum()] * 4)
    for gathered in ended(hvd.grouped_allgather_async, [mine, mine]):
        np.testing.assert_array_equal(front.values(gathered), np.repeat(theirs, 4))
    for scattered in ended(hvd.grouped_reducescatter_async, [mine, mine], op=hvd.Sum):
        np.testing.assert_array_equal(front.values(scattered), rows)


# Calls that a rank may not make in a set that it is none of.
REFUSED = (
    lambda hvd, mine, of: hvd.grouped_allreduce([mine], process_set=of),
    lambda hvd, mine, of: hvd.allgather(mine, process_set=of),
    lambda hvd, mine, of: hvd.grouped_allgather([mine], process_set=of),
    lambda hvd, mine, of: hvd.broadcast(mine, 0, process_set=of),
    lambda hvd, mine, of: hvd.reducescatter(mine, process_set=of),
    lambda hvd, mine, of: hvd.grouped_reducescatter([mine], process_set=of),
    lambda hvd, mine, of: hvd.alltoall(mine, process_set=of),
    lambda hvd, mine, of: hvd.barrier(process_set=of),
)


def check_process_sets(front: Any) -> None:
    hvd = front.hvd
    rank, n = hvd.rank(), hvd.size()
    ranks = [[r, r + 1] for r in range(n - 1) if n > 2] + ([[n - 1]] if n > 1 else [])
    sets = [hvd.add_process_set(ranks_of) for ranks_of in ranks]
    for number, ranks_of in zip(sets, ranks, strict=True):
        assert (number.ranks, number.size(), number.included()) == (ranks_of, len(ranks_of), rank in ranks_of)
        assert number.rank() == (ranks_of.index(rank) if rank in ranks_of else None)
    mine = front.tensor(np.full(4, rank + 1.0), "float32")
    handles = [
        hvd.allreduce_async(mine, op=hvd.Sum, process_set=s) if s.included() and front.handles else None for s in sets
    ]
    for _ in range(2):
        for members, handle in zip(sets, handles, strict=True):
            if not members.included():
                for refused in REFUSED if front.handles else ():
                    with pytest.raises(ValueError, match=r"of which this rank is none|root_rank=0|only its own ranks"):
                        refused(hvd, mine, members)
                with pytest.raises(ValueError, match="of which this rank is none"):
                    hvd.allreduce(mine, process_set=members)
                continue
            theirs = np.array(members.ranks) + 1.0
            summed = hvd.synchronize(handle) if front.handles else None
            assert summed is None or front.values(summed)[0] == theirs.sum()
            np.testing.assert_allclose(front.values(hvd.allreduce(mine, process_set=members)), theirs.mean())
            np.testing.assert_array_equal(front.values(hvd.allgather(mine, process_set=members)), np.repeat(theirs, 4))
            root = members.ranks[-1]
            assert front.values(hvd.broadcast(mine, root, process_set=members))[0] == root + 1
            scattered = front.values(hvd.reducescatter(mine, op=hvd.Sum, process_set=members))
            np.testing.assert_array_equal(scattered, np.full(4 // len(theirs), theirs.sum()))
            received, _ = hvd.alltoall(mine, [1] * len(theirs), process_set=members)
            np.testing.assert_array_equal(front.values(received), theirs)
            first, _ = hvd.grouped_allreduce([mine, mine], op=hvd.Max, process_set=members)
            assert front.values(first)[0] == theirs.max()
            assert len(front.values(hvd.grouped_allgather([mine], process_set=members)[0])) == 4 * len(theirs)
            if front.handles:
                _check_started(front, members, mine, theirs)
            if front.in_place:
                changed = front.tensor(np.ones(2), "float32")
                hvd.allreduce_(changed, op=hvd.Sum, process_set=members)
                assert front.values(changed)[0] == len(theirs)
            (grad,) = front.gradients(
                lambda x, members=members: (hvd.allgather(x, process_set=members) * (rank + 1.0)).sum(),
                [np.ones(2, dtype=np.float32)],
            )
            np.testing.assert_allclose(grad, theirs.mean(), rtol=1e-6)
            hvd.barrier(process_set=members)
            assert hvd.allgather_object({"of": rank}, process_set=members) == [{"of": other} for other in members.ranks]
            assert hvd.broadcast_object(rank, root, process_set=members) == root
    for again in (range(n), ranks[0] if ranks else [0]):
        with pytest.raises(ValueError, match="already"):
            hvd.add_process_set(again)
    with pytest.raises(ValueError, match=f"rank {n}"):
        hvd.add_process_set([0, n])
    for members in sets:
        assert hvd.remove_process_set(members)
        assert members.process_set_id is None
        assert not hvd.remove_process_set(members)
    assert not hvd.remove_process_set(hvd.global_process_set)
    hvd.shutdown()
    static = hvd.ProcessSet([n - 1])
    hvd.init(process_sets=[static] if n > 1 else None)
    if static.included():
        assert front.values(hvd.allreduce(mine, op=hvd.Sum, process_set=static))[0] == n


CHECKS = [
    check_process_sets,
    check_join,
    check_reducescatter,
    check_alltoall,
    check_grouped_allgather,
    check_exchanges_that_disagree,
    check_gradients_of_exchanges,
]
