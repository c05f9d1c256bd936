from __future__ import annotations

import itertools
from typing import Any

import pytest

from sparkvod.core import ops
from sparkvod.core.reducer import Gradient, Reducer, plan_buckets
from tests.core.engines import lone_engine

F32, F64, F16, BF16 = (ops.CODES[name] for name in ("float32", "float64", "float16", "bfloat16"))


def gradients(*counts: int, dtype: int = F32) -> list[Gradient]:
    return [Gradient(f"p{index}", count, dtype) for index, count in enumerate(counts)]


def members(plans: list[Any]) -> list[list[int]]:
    return [[slot.index for slot in plan.slots] for plan in plans]


def plan(of: list[Gradient], first: int = 100, full: int = 1000, groups: list[list[int]] | None = None) -> list[Any]:
    return plan_buckets(of, prefix="x", bucket_bytes=full, first_bucket_bytes=first, groups=groups)


def test_buckets_are_filled_from_the_end_and_the_first_is_small() -> None:
    assert members(plan(gradients(100, 100, 100, 10, 10, 10))) == [[5, 4], [3, 2], [1], [0]]


def test_buckets_become_smaller_towards_the_end_of_the_backward_pass() -> None:
    sizes = [100 * len(bucket) for bucket in members(plan(gradients(*[25] * 40)))]
    assert sizes == [100, 1000, 1000, 900, 500, 200, 100, 100, 100]
    left = [sum(sizes[number:]) for number in range(len(sizes))]
    assert all(size <= max(100, rest // 2) for size, rest in zip(sizes[1:], left[1:], strict=True))


def test_a_large_gradient_is_alone() -> None:
    assert members(plan(gradients(10, 5000, 10))) == [[2], [1], [0]]


def test_nothing_and_one() -> None:
    assert plan([]) == []
    assert members(plan(gradients(0))) == [[0]]


def test_dtypes_do_not_mix() -> None:
    mixed = [Gradient(f"p{index}", 4, F32 if index % 2 else F64) for index in range(6)]
    plans = plan(mixed)
    assert sorted(itertools.chain.from_iterable(members(plans))) == list(range(6))
    assert all(len({mixed[index].dtype for index in bucket}) == 1 for bucket in members(plans))
    assert all(plan.dtype == mixed[plan.slots[0].index].dtype for plan in plans)


def test_groups_are_buckets_and_the_rest_is_alone() -> None:
    assert members(plan(gradients(1, 1, 1, 1), groups=[[0, 3], [2]])) == [[2], [1], [0, 3]]
    assert members(plan(gradients(1, 1), groups=[])) == [[1], [0]]


def test_slots_are_aligned_and_apart() -> None:
    for dtype in (F32, F64, F16, BF16):
        (bucket,) = plan(gradients(3, 17, 0, 1, dtype=dtype), first=1 << 20)
        ends = [slot.offset + slot.count for slot in bucket.slots]
        assert all(slot.offset * ops.ITEMSIZES[dtype] % 64 == 0 for slot in bucket.slots)
        assert all(slot.offset >= end for slot, end in zip(bucket.slots[1:], ends, strict=False))
        assert bucket.flags >= ends[-1]
        assert bucket.count == bucket.flags + 4 + 1


def test_names_differ_and_tell_the_parameters() -> None:
    names = [bucket.name for bucket in plan(gradients(100, 100, 100, 10, 10, 10))]
    assert names == ["x.bucket0[p5..p4]", "x.bucket1[p3..p2]", "x.bucket2[p1]", "x.bucket3[p0]"]


class Recorder:
    """An engine that remembers the order of submission."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.names = engine, []

    def allreduce(self, name: str, *arguments: Any) -> int:
        self.names.append(name.split("[")[0])
        return self.engine.allreduce(name, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16])
def test_flags_tell_who_had_a_gradient(dtype: int) -> None:
    with lone_engine() as engine:
        reducer = Reducer(engine, plan(gradients(3, 5, 7, dtype=dtype), first=1 << 20), ops.Average)
        reducer.release("")
        for present in ([0, 1, 2], [1], [], [0, 1, 2]):
            for index in present:
                reducer.ready(index)
            assert reducer.begun == bool(present)
            missing = reducer.missing()
            assert sorted([*missing, *present]) == [0, 1, 2]
            for index in missing:
                reducer.absent(index)
            reducer.wait()
            assert [index for index in range(3) if reducer.had_gradient(index)] == present
            reducer.reset()
            assert not reducer.begun


def test_absent_gradients_are_zeros() -> None:
    with lone_engine() as engine:
        reducer = Reducer(engine, plan(gradients(3, 5), first=1 << 20), ops.Sum)
        reducer.release("")
        bucket, slot = reducer.place(0)
        values = memoryview(bucket.memory).cast("B").cast("f")
        values[:] = memoryview(bytes(values.nbytes)).cast("f")
        for element in range(bucket.plan.count):
            values[element] = 7
        reducer.ready(1)
        reducer.missing()
        reducer.absent(0)
        reducer.wait()
        assert values[slot.offset : slot.offset + 3].tolist() == [0, 0, 0]
        other = reducer.place(1)[1]
        assert values[other.offset : other.offset + 5].tolist() == [7] * 5


def test_buckets_are_submitted_in_order_except_past_late_ones() -> None:
    with lone_engine() as engine:
        recorder: Any = Recorder(engine)
        reducer = Reducer(recorder, plan(gradients(1, 1, 1), groups=[]), ops.Sum)
        reducer.release("")

        def finish() -> None:
            for index in reducer.missing():
                reducer.absent(index)
            reducer.wait()
            reducer.reset()

        reducer.ready(0)
        assert recorder.names == []  # buckets 0 and 1, of gradients 2 and 1, come first
        reducer.ready(2)
        assert recorder.names == ["x.bucket0"]
        reducer.ready(1)
        assert recorder.names == ["x.bucket0", "x.bucket1", "x.bucket2"]
        finish()
        recorder.names.clear()
        reducer.ready(2)
        reducer.ready(0)
        assert recorder.names == ["x.bucket0"]
        finish()  # bucket 1 was late
        recorder.names.clear()
        reducer.ready(2)
        reducer.ready(0)
        assert recorder.names == ["x.bucket0", "x.bucket2"]
        finish()
        assert recorder.names == ["x.bucket0", "x.bucket2", "x.bucket1"]


def test_nothing_is_submitted_before_the_release_which_names_the_buckets() -> None:
    with lone_engine() as engine:
        recorder: Any = Recorder(engine)
        reducer = Reducer(recorder, plan(gradients(1, 1), groups=[]), ops.Sum)
        reducer.ready(1)
        reducer.ready(0)
        assert reducer.begun
        assert recorder.names == []
        reducer.release("of.")
        assert reducer.missing() == []
        reducer.wait()
        assert recorder.names == ["of.x.bucket0", "of.x.bucket1"]


@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16])
def test_news_are_heard(dtype: int) -> None:
    with lone_engine() as engine:
        reducer = Reducer(engine, plan(gradients(3, 5, dtype=dtype), first=1), ops.Average)
        assert len(reducer.buckets) == 2
        reducer.release("")
        for news in (False, True, False):
            reducer.announce = False
            reducer.ready(1)
            reducer.announce = news  # one bucket that was not sent yet is enough
            reducer.ready(0)
            reducer.wait()
            assert reducer.heard == news
            assert reducer.had_gradient(0)
            reducer.reset()


def test_an_engine_that_ends_fails_the_step_and_leaves_the_reducer_clean() -> None:
    from sparkvod.errors import ShutDownError

    with lone_engine() as engine:
        reducer = Reducer(engine, plan(gradients(1)), ops.Sum)
        reducer.release("")
        engine.shutdown()
        with pytest.raises(ShutDownError):
            reducer.ready(0)
        reducer.reset()
        assert not reducer.begun
