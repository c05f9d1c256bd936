"""What every front end promises, checked in a world of ranks.

A front end joins with a subclass of :class:`FrontEnd` and

    SUITE = Suite(CHECKS, [MyFrontEnd()], join)

    @pytest.mark.parametrize("size", [1, 2, 3])
    @pytest.mark.parametrize("check", SUITE.names)
    def test_contract(check, size):
        SUITE.verify(check, size)
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from sparkvod.errors import MismatchError, NotInitializedError
from tests.contracts import exchanges

REDUCED = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
MOVED = (*REDUCED, "bool")
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (17,), (3, 0, 2), (5, 7), (1001, 3))


class FrontEnd(ABC):
    """What the checks must know of a front end.

    Attributes:
        module: name of its module.
        in_place: whether it has operations in place.
        handles: whether it has operations that return handles.
        forks: whether its calls end in a forked process: not where threads of the framework run them, which that
            process does not have.
        shapes: the shapes in which every dtype is reduced.
    """

    module: str
    in_place = True
    handles = True
    forks = True
    shapes = SHAPES

    @property
    def hvd(self) -> Any:
        """Its module."""
        return importlib.import_module(self.module)

    @abstractmethod
    def tensor(self, values: Any, dtype: str) -> Any:
        """Returns a tensor of the values, in a dtype of ``MOVED``."""

    @abstractmethod
    def strided(self, values: Any, dtype: str) -> Any:
        """Returns a tensor of the values, at least 2-D, that does not lie contiguously in memory."""

    @abstractmethod
    def values(self, tensor: Any) -> np.ndarray:
        """Returns a tensor's values, as float64 where NumPy lacks its dtype."""

    @abstractmethod
    def dtype(self, tensor: Any) -> str:
        """Returns the name of a tensor's dtype."""

    @abstractmethod
    def gradients(self, function: Callable[..., Any], inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the gradients of ``function(*tensors)``, a scalar tensor, by its float32 inputs."""


def _input(shape: Sequence[int], dtype: str, rank: int) -> np.ndarray:
    values = np.arange(int(np.prod(shape)), dtype=np.float64).reshape(shape) % 11 + rank + 1
    return (values % 2).astype(bool) if dtype == "bool" else values


def join(front: FrontEnd) -> None:
    """Makes the ranks a world before the checks."""
    front.hvd.init()


def check_world(front: FrontEnd) -> None:
    hvd = front.hvd
    hvd.shutdown()
    with pytest.raises(NotInitializedError, match="init"):
        hvd.rank()
    with pytest.raises(ValueError, match="init"):
        hvd.allreduce(front.tensor([1.0], "float32"))
    hvd.init()
    hvd.init()
    assert hvd.is_initialized()
    assert 0 <= hvd.rank() < hvd.size()
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous()
    assert not hvd.mpi_threads_supported()
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


def check_bad_init(front: FrontEnd) -> None:
    hvd = front.hvd
    hvd.shutdown()
    with pytest.raises(ValueError, match="comm"):
        hvd.init(comm=[0])
    with pytest.raises(ValueError, match="process_sets"):
        hvd.init(process_sets=[[0]])
    assert not hvd.is_initialized()
    hvd.init(comm=[], process_sets="dynamic")


def check_init_again(front: FrontEnd) -> None:
    hvd = front.hvd
    for _ in range(3):
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        hvd.init()
        total = hvd.allreduce(front.tensor([1.0], "float32"), op=hvd.Sum)
        assert front.values(total)[0] == hvd.size()


def check_allreduce(front: FrontEnd) -> None:
    hvd = front.hvd
    for dtype in REDUCED:
        for shape in front.shapes:
            mine = _input(shape, dtype, hvd.rank())
            total = sum(_input(shape, dtype, rank) for rank in range(hvd.size()))
            tensor = front.tensor(mine, dtype)
            summed = hvd.allreduce(tensor, op=hvd.Sum, name=f"sum.{dtype}.{shape}")
            np.testing.assert_array_equal(front.values(summed), total)
            np.testing.assert_array_equal(front.values(tensor), mine)
            assert front.dtype(summed) == dtype
            assert front.values(summed).shape == shape
            mean = np.trunc(total / hvd.size()) if "int" in dtype else total / hvd.size()
            averaged = hvd.allreduce(tensor)
            np.testing.assert_allclose(front.values(averaged), mean, rtol=0.01 if "float16" in dtype else 1e-6)


def check_reduce_operations(front: FrontEnd) -> None:
    hvd = front.hvd
    by_op = {hvd.Sum: np.add, hvd.Min: np.minimum, hvd.Max: np.maximum, hvd.Product: np.multiply}
    for dtype in MOVED:
        for shape in ((), (0,), (17,), (3000, 9)):
            by_rank = [_input(shape, dtype, rank) % 4 for rank in range(hvd.size())]
            if dtype == "bool":
                by_rank = [values.astype(bool) for values in by_rank]
            tensor = front.tensor(by_rank[hvd.rank()], dtype)
            group = []
            for op, combine in by_op.items():
                expected = combine.reduce(by_rank).astype(by_rank[0].dtype)
                np.testing.assert_array_equal(front.values(hvd.allreduce(tensor, op=op)), expected)
                group.append((hvd.grouped_allreduce([tensor, tensor], op=op), expected))
            for reduced, expected in group:
                for one in reduced:
                    np.testing.assert_array_equal(front.values(one), expected)
                    assert front.dtype(one) == dtype
    nan = front.tensor([np.nan if hvd.rank() == 0 else 1.0, 2.0], "float32")
    for op in (hvd.Min, hvd.Max):
        np.testing.assert_array_equal(np.isnan(front.values(hvd.allreduce(nan, op=op))), [True, False])


def check_adasum(front: FrontEnd) -> None:
    hvd = front.hvd
    rank, n = hvd.rank(), hvd.size()
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        # Equal vectors give themselves, orthogonal ones their sum.
        same = front.tensor(np.arange(1.0, 301.0), dtype)
        np.testing.assert_allclose(front.values(hvd.allreduce(same, op=hvd.Adasum)), front.values(same), rtol=0.02)
        unit = front.tensor(np.eye(n)[rank] * (rank + 1), dtype)
        both = hvd.grouped_allreduce([unit, same], op=hvd.Adasum)
        np.testing.assert_allclose(front.values(both[0]), np.arange(n) + 1.0)
        np.testing.assert_allclose(front.values(both[1]), front.values(same), rtol=0.02)
    with pytest.raises(ValueError, match=r"allreduce \(adasum\).*float16, bfloat16, float32, float64"):
        hvd.allreduce(front.tensor([1], "int32"), op=hvd.Adasum)


def check_integer_average_truncates(front: FrontEnd) -> None:
    hvd = front.hvd
    mine = np.array([-7, 7, -1, 1, 0]) * (1 if hvd.rank() == 0 else 0)
    averaged = hvd.allreduce(front.tensor(mine, "int64"))
    np.testing.assert_array_equal(front.values(averaged), np.trunc(np.array([-7, 7, -1, 1, 0]) / hvd.size()))


def check_large_allreduce(front: FrontEnd) -> None:
    hvd = front.hvd
    values = np.random.default_rng(hvd.rank()).standard_normal(3_000_001).astype(np.float32)
    mean = sum(np.random.default_rng(rank).standard_normal(3_000_001) for rank in range(hvd.size())) / hvd.size()
    averaged = front.values(hvd.allreduce(front.tensor(values, "float32")))
    np.testing.assert_allclose(averaged, mean, atol=1e-5)
    assert len(set(hvd.allgather_object(zlib.crc32(averaged.tobytes())))) == 1


def check_scale_factors(front: FrontEnd) -> None:
    hvd = front.hvd
    n = hvd.size()
    # Where each shape and dtype costs a trace of its own, a few of them.
    for dtype in REDUCED if front.handles else ("float32", "float64", "bfloat16"):
        # None, through one message, and through the staging areas.
        for count in (0, 2, 30_000) if front.handles else (2,):
            values = np.resize([2.0, 4.0], count)
            tensor = front.tensor(values, dtype)
            for op, expected in ((hvd.Sum, n * values), (hvd.Average, values), (hvd.Min, values), (hvd.Max, values)):
                scaled = hvd.allreduce(tensor, op=op, prescale_factor=0.5, postscale_factor=4.0)
                np.testing.assert_array_equal(front.values(scaled), 2 * expected)
                assert front.dtype(scaled) == dtype
            if not front.handles:
                continue
            _, second = hvd.grouped_allreduce([tensor, tensor], op=hvd.Product, prescale_factor=0.5)
            np.testing.assert_array_equal(front.values(second), (values / 2) ** n)
            shares = hvd.reducescatter(tensor, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
            np.testing.assert_array_equal(front.values(shares), n * exchanges.share(values, hvd.rank(), n))
        if "int" in dtype:  # in float64, and then towards zero, before and after
            odd = front.tensor([3], dtype)
            assert front.values(hvd.allreduce(odd, op=hvd.Sum, prescale_factor=0.5))[0] == n
            assert front.values(hvd.allreduce(odd, op=hvd.Sum, postscale_factor=0.5))[0] == 3 * n // 2
        else:
            averaged = hvd.allreduce(front.tensor([2.0, 4.0], dtype), prescale_factor=2.0)
            np.testing.assert_allclose(front.values(averaged), [4.0, 8.0])


def check_nothing(front: FrontEnd) -> None:
    """Tensors without elements go through every collective."""
    if not front.handles:  # would trace each of them; check_allreduce and its like have some
        return
    hvd = front.hvd
    n = hvd.size()
    for dtype in ("float32", "bfloat16", "int64"):
        for shape in ((0,), (0, 3), (2 * n, 0)):
            empty = front.tensor(np.zeros(shape), dtype)
            for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Product, *([hvd.Adasum] if "float" in dtype else [])):
                assert front.values(hvd.allreduce(empty, op=op)).shape == shape
            rows = (0 if shape[0] == 0 else n * shape[0], *shape[1:])
            share = (shape[0] // n, *shape[1:])
            one = front.tensor([1.0], dtype)
            first, second, third = hvd.grouped_allreduce([empty, one, empty], op=hvd.Sum)
            assert [front.values(first).shape, front.values(third).shape] == [shape, shape]
            assert front.values(second)[0] == n
            assert front.values(hvd.allgather(empty)).shape == rows
            assert [front.values(each).shape for each in hvd.grouped_allgather([empty, empty])] == [rows, rows]
            assert front.values(hvd.broadcast(empty, n - 1)).shape == shape
            assert front.values(hvd.reducescatter(empty, op=hvd.Sum)).shape == share
            first, second = hvd.grouped_reducescatter([empty, front.tensor(np.ones(n), dtype)], op=hvd.Sum)
            assert front.values(first).shape == share
            np.testing.assert_array_equal(front.values(second), [n])
            assert front.values(hvd.alltoall(empty)).shape == shape
            assert front.values(hvd.alltoall(empty, [0] * n)[0]).shape == (0, *shape[1:])


def check_fork(front: FrontEnd) -> None:
    """A process that is forked from a rank may read the ranks, and is told why it may do no more."""
    if not front.forks:
        return
    hvd = front.hvd
    tensor = front.tensor([1.0], "float32")
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: hvd.allreduce(tensor),
        "grouped_allreduce": lambda: hvd.grouped_allreduce([tensor]),
        "allgather": lambda: hvd.allgather(tensor),
        "broadcast": lambda: hvd.broadcast(tensor, 0),
        "alltoall": lambda: hvd.alltoall(tensor, [1] + [0] * (hvd.size() - 1)),
        "reducescatter": lambda: hvd.reducescatter(tensor),
        "broadcast_object": lambda: hvd.broadcast_object(1),
        "add_process_set": lambda: hvd.add_process_set([0]),
        "barrier": hvd.barrier,
        "join": hvd.join,
        "stats": hvd.stats,
    }
    hvd.allreduce(tensor)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # the frameworks' own threads are not there, so that it might wait for one for ever
        said = {"rank": str(hvd.rank())}
        for name, call in calls.items():
            try:
                call()
                said[name] = "nothing"
            except BaseException as error:
                said[name] = f"{type(error).__name__}: {error}"
        os.write(writer, json.dumps(said).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    said = json.loads(text or "{}")
    assert said.pop("rank", None) == str(hvd.rank())
    assert list(said) == list(calls)
    for name, words in said.items():
        assert words.startswith("NotInitializedError"), (name, words)
        assert "forked from a rank" in words, (name, words)
    assert front.values(hvd.allreduce(tensor, op=hvd.Sum))[0] == hvd.size()


def check_in_place(front: FrontEnd) -> None:
    if not front.in_place:
        return
    hvd = front.hvd
    tensor = front.tensor([1.0, 2.0], "float32")
    assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
    np.testing.assert_array_equal(front.values(tensor), [hvd.size(), 2.0 * hvd.size()])
    ranked = front.tensor([hvd.rank() + 0.5], "float64")
    assert hvd.broadcast_(ranked, hvd.size() - 1) is ranked
    assert front.values(ranked)[0] == hvd.size() - 0.5
    group = [front.tensor([1.0], "float32"), front.tensor([[1, 2]], "int32")]
    reduced = hvd.grouped_allreduce_(group, op=hvd.Sum)
    assert all(mine is theirs for mine, theirs in zip(group, reduced, strict=True))
    np.testing.assert_array_equal(front.values(group[1]), [[hvd.size(), 2 * hvd.size()]])


def check_strided(front: FrontEnd) -> None:
    hvd = front.hvd
    values = np.arange(12.0).reshape(3, 4) + hvd.rank()
    total = sum(np.arange(12.0).reshape(3, 4) + rank for rank in range(hvd.size()))
    np.testing.assert_array_equal(front.values(hvd.allreduce(front.strided(values, "float32"), op=hvd.Sum)), total)
    gathered = front.values(hvd.allgather(front.strided(values, "float32")))
    np.testing.assert_array_equal(gathered[hvd.rank() * 3 : hvd.rank() * 3 + 3], values)
    if front.in_place:
        tensor = front.strided(values, "float32")
        assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
        np.testing.assert_array_equal(front.values(tensor), total)
        tensor = front.strided(values, "float32")
        hvd.broadcast_(tensor, 0)
        np.testing.assert_array_equal(front.values(tensor), np.arange(12.0).reshape(3, 4))


def check_async(front: FrontEnd) -> None:
    if not front.handles:
        return
    hvd = front.hvd
    n = hvd.size()
    tensors = [front.tensor(np.full(k % 7, k + hvd.rank()), "float32") for k in range(100)]
    started = [hvd.allreduce_async(tensor, op=hvd.Sum, name=f"async.{k}") for k, tensor in enumerate(tensors)]
    unnamed = [hvd.allreduce_async(tensor) for tensor in tensors]
    assert all(isinstance(handle, int) for handle in started)
    assert len(set(started + unnamed)) == 200
    for k in reversed(range(100)):
        expected = np.full(k % 7, n * k + n * (n - 1) / 2)
        np.testing.assert_allclose(front.values(hvd.synchronize(started[k])), expected)
        np.testing.assert_allclose(front.values(hvd.synchronize(unnamed[k])), expected / n, rtol=1e-6)
    gather = hvd.allgather_async(front.tensor([hvd.rank()], "int64"))
    spread = hvd.broadcast_async(front.tensor([hvd.rank()], "int64"), 0)
    group = hvd.grouped_allreduce_async([front.tensor([1], "int64"), front.tensor([1.0], "float32")], op=hvd.Sum)
    np.testing.assert_array_equal(front.values(hvd.synchronize(gather)), np.arange(n))
    np.testing.assert_array_equal(front.values(hvd.synchronize(spread)), [0])
    assert [front.values(tensor)[0] for tensor in hvd.synchronize(group)] == [n, n]


def check_handles(front: FrontEnd) -> None:
    if not front.handles:
        return
    hvd = front.hvd
    handle = hvd.allreduce_async(front.tensor([1.0], "float32"))
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle) is not None
    assert hvd.synchronize(handle) is None
    assert hvd.synchronize(123_456_789) is None
    assert hvd.poll(handle)


def check_grouped(front: FrontEnd) -> None:
    hvd = front.hvd
    shapes = [(3,), (), (2, 2), (0,), (1000,)]
    mine = [_input(shape, "float32", hvd.rank()) for shape in shapes]
    reduced = hvd.grouped_allreduce([front.tensor(values, "float32") for values in mine], op=hvd.Sum, name="group")
    assert len(reduced) == len(shapes)
    for shape, tensor in zip(shapes, reduced, strict=True):
        total = sum(_input(shape, "float32", rank) for rank in range(hvd.size()))
        np.testing.assert_array_equal(front.values(tensor), total)


def check_allgather(front: FrontEnd) -> None:
    hvd = front.hvd
    for dtype in MOVED:
        for tail in ((), (3,), (2, 5), (0,)):
            rows = [0 if rank == 1 else rank + 2 for rank in range(hvd.size())]
            all_of_them = [_input((count, *tail), dtype, rank) for rank, count in enumerate(rows)]
            gathered = hvd.allgather(front.tensor(all_of_them[hvd.rank()], dtype))
            np.testing.assert_array_equal(front.values(gathered), np.concatenate(all_of_them))
            assert front.dtype(gathered) == dtype
    scalars = hvd.allgather(front.tensor(hvd.rank() * 2.0, "float32"))
    np.testing.assert_array_equal(front.values(scalars), np.arange(hvd.size()) * 2.0)
    nothing = hvd.allgather(front.tensor(np.zeros((0, 4)), "float32"))
    assert front.values(nothing).shape == (0, 4)


def check_broadcast(front: FrontEnd) -> None:
    hvd = front.hvd
    for root in range(hvd.size()):
        for dtype in MOVED:
            for shape in ((), (0,), (17,), (5, 7)):
                mine = _input(shape, dtype, hvd.rank())
                tensor = front.tensor(mine, dtype)
                received = hvd.broadcast(tensor, root)
                np.testing.assert_array_equal(front.values(received), _input(shape, dtype, root))
                np.testing.assert_array_equal(front.values(tensor), mine)
                assert front.dtype(received) == dtype


def check_objects(front: FrontEnd) -> None:
    hvd = front.hvd
    for root in range(hvd.size()):
        sent = {"rank": root, "numbers": list(range(10_000))}
        mine = sent if hvd.rank() == root else None
        assert hvd.broadcast_object(mine, root) == sent
        assert hvd.broadcast_object(mine, root_rank=root, name="named") == sent
    gathered = hvd.allgather_object("x" * (hvd.rank() * 1000))
    assert [len(text) for text in gathered] == [rank * 1000 for rank in range(hvd.size())]


def check_barrier(front: FrontEnd) -> None:
    for _ in range(3):
        front.hvd.barrier()


def check_compression(front: FrontEnd) -> None:
    hvd = front.hvd
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        for dtype in ("float32", "float64", "int32"):
            tensor = front.tensor([1.0, 2.0, 3.0], dtype)
            reduced = hvd.allreduce(tensor, op=hvd.Sum, compression=compression)
            assert front.dtype(reduced) == dtype
            np.testing.assert_allclose(front.values(reduced), np.array([1.0, 2.0, 3.0]) * hvd.size(), rtol=0.01)
    small, context = hvd.Compression.fp16.compress(front.tensor([1.0], "float32"))
    assert front.dtype(small) == "float16"
    assert front.dtype(hvd.Compression.fp16.decompress(small, context)) == "float32"
    for reduce in (hvd.allreduce, lambda t, **options: hvd.grouped_allreduce([t], **options), hvd.reducescatter):
        with pytest.raises(TypeError, match="compression=5 was found, one of Compression.none"):
            reduce(tensor, compression=5)
        with pytest.raises(ValueError, match=r"TopK\(ratio=0.5\).*works in sparkvod.torch's DistributedOptimizer"):
            reduce(tensor, compression=hvd.Compression.topk(0.5))


def check_average_argument(front: FrontEnd) -> None:
    hvd = front.hvd
    tensor = front.tensor([1.0], "float32")
    with pytest.raises(ValueError, match="average"):
        hvd.allreduce(tensor, average=True, op=hvd.Sum)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert front.values(hvd.allreduce(tensor, average=True))[0] == 1
        assert front.values(hvd.allreduce(tensor, average=False))[0] == hvd.size()
    assert [warning.category for warning in caught] == [DeprecationWarning] * 2


def check_bad_arguments(front: FrontEnd) -> None:
    hvd = front.hvd
    tensor = front.tensor([1.0], "float32")
    with pytest.raises(ValueError, match="op=17"):
        (hvd.allreduce_async if front.handles else hvd.allreduce)(tensor, op=17)
    for root in (-1, hvd.size()):
        with pytest.raises(ValueError, match=f"root_rank={root}"):
            hvd.broadcast(tensor, root)
    with pytest.raises(ValueError, match=r"process_set.*add_process_set"):
        hvd.allgather(tensor, process_set=hvd.ProcessSet([hvd.size() + 1]))
    with pytest.raises(TypeError, match=r"process_set=\[0\] was found, a ProcessSet was expected"):
        hvd.broadcast(tensor, 0, process_set=[0])
    with pytest.raises(TypeError, match="postscale_factor='2' was found, a number was expected"):
        hvd.allreduce(tensor, postscale_factor="2")
    everybody = hvd.ProcessSet(range(hvd.size()))
    np.testing.assert_array_equal(front.values(hvd.allreduce(tensor, process_set=everybody)), [1.0])
    with pytest.raises(ValueError, match=r"allreduce \(average\).*dtype bool; it can be done for uint8, int8"):
        hvd.allreduce(front.tensor([1], "bool"))
    assert (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product) == (0, 1, 2, 3, 4, 5)


def check_same_name_in_flight(front: FrontEnd) -> None:
    hvd = front.hvd
    if hvd.size() == 1 or not front.handles:
        return
    tensor = front.tensor(np.zeros(1000), "float32")
    if hvd.rank() == 0:
        # Cannot end before the barrier, behind which the others submit theirs.
        handle = hvd.allreduce_async(tensor, name="twice")
        with pytest.raises(ValueError, match="twice"):
            hvd.allreduce_async(tensor, name="twice")
        hvd.barrier()
    else:
        hvd.barrier()
        handle = hvd.allreduce_async(tensor, name="twice")
    hvd.synchronize(handle)


def check_disagreement(front: FrontEnd) -> None:
    hvd = front.hvd
    if hvd.size() == 1:
        return
    odd = hvd.rank() == 1
    for mine in (
        lambda: hvd.allreduce(front.tensor(np.zeros(5 if odd else 4), "float32"), name="disagree.shape"),
        lambda: hvd.allreduce(front.tensor(np.zeros(4), "float64" if odd else "float32"), name="disagree.dtype"),
        lambda: hvd.allreduce(front.tensor(np.zeros(4), "float32"), op=hvd.Sum if odd else None, name="disagree.op"),
        lambda: hvd.broadcast(front.tensor(np.zeros(4), "float32"), 1 if odd else 0, name="disagree.root"),
        lambda: hvd.allgather(front.tensor(np.zeros((2, 5 if odd else 4)), "float32"), name="disagree.columns"),
    ):
        with pytest.raises(MismatchError, match=r"disagree\.") as caught:
            mine()
        assert isinstance(caught.value, hvd.HorovodInternalError)
        assert "1" in str(caught.value)
    # The world goes on.
    assert front.values(hvd.allreduce(front.tensor([1.0], "float32"), op=hvd.Sum))[0] == hvd.size()


def check_gradients(front: FrontEnd) -> None:
    hvd = front.hvd
    rank, n = hvd.rank(), hvd.size()
    ranks = np.arange(n)
    values = np.ones(3, dtype=np.float32)

    # Each rank's loss is (rank + 1) * the sum of the result.
    def loss(result: Any) -> Any:
        return (result * (rank + 1.0)).sum()

    (grad,) = front.gradients(lambda x: loss(hvd.allreduce(x, op=hvd.Sum)), [values])
    np.testing.assert_allclose(grad, np.full(3, (ranks + 1).sum()))
    (grad,) = front.gradients(lambda x: loss(hvd.allreduce(x)), [values])
    np.testing.assert_allclose(grad, np.full(3, (ranks + 1).mean()), rtol=1e-6)
    first, second = front.gradients(
        lambda x, y: sum(loss(result) for result in hvd.grouped_allreduce([x, y], op=hvd.Sum)), [values, values[:1]]
    )
    np.testing.assert_allclose(first, np.full(3, (ranks + 1).sum()))
    np.testing.assert_allclose(second, np.full(1, (ranks + 1).sum()))
    (grad,) = front.gradients(lambda x: loss(hvd.broadcast(x, n - 1)), [values])
    np.testing.assert_allclose(grad, np.full(3, (ranks + 1).mean() if rank == n - 1 else 0), rtol=1e-6)
    rows = np.ones((rank + 1, 2), dtype=np.float32)
    weights = np.arange((ranks + 1).sum() * 2, dtype=np.float32).reshape(-1, 2)
    (grad,) = front.gradients(lambda x: (hvd.allgather(x) * front.tensor(weights, "float32")).sum(), [rows])
    begin = int((ranks[:rank] + 1).sum())
    np.testing.assert_allclose(grad, weights[begin : begin + rank + 1], rtol=1e-6)


CHECKS = [
    check_world,
    check_bad_init,
    check_init_again,
    check_allreduce,
    check_reduce_operations,
    check_adasum,
    check_integer_average_truncates,
    check_large_allreduce,
    check_scale_factors,
    check_nothing,
    check_fork,
    check_in_place,
    check_strided,
    check_async,
    check_handles,
    check_grouped,
    check_allgather,
    check_broadcast,
    check_objects,
    check_barrier,
    check_compression,
    check_average_argument,
    check_bad_arguments,
    check_same_name_in_flight,
    check_disagreement,
    check_gradients,
    *exchanges.CHECKS,
]
