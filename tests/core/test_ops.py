from __future__ import annotations

import pytest

from sparkvod.core import ops
from sparkvod.core.gradients import scales
from sparkvod.core.process_sets import ProcessSet, global_process_set


def test_codes_are_the_engines() -> None:
    expected = {"uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "int32": 4, "int64": 5}
    expected |= {"float16": 6, "bfloat16": 7, "float32": 8, "float64": 9, "bool": 10}
    assert expected == ops.CODES
    assert len(ops.ITEMSIZES) == len(ops.DTYPES)


def test_reduce_op() -> None:
    assert ops.reduce_op(None) == ops.reduce_op(ops.Average) == ops.Average
    assert ops.reduce_op(ops.Sum) == ops.Sum
    with pytest.warns(DeprecationWarning, match="average="):
        assert ops.allreduce_op(None, average=False) == ops.Sum
    assert [ops.allreduce_op(op) for op in (ops.Adasum, ops.Min, ops.Max, ops.Product)] == [2, 3, 4, 5]
    with pytest.raises(ValueError, match=r"op=Min was found, Average or Sum was expected"):
        ops.reduce_op(ops.Min)
    with pytest.raises(ValueError, match="op='sum' was found"):
        ops.reduce_op("sum")  # type: ignore[arg-type]


def test_predivide() -> None:
    _, prescale, postscale = scales(ops.Average, 2.0, 8)
    assert prescale * postscale * 8 == 1


def test_process_sets() -> None:
    subset = ProcessSet([3, 1, 1])
    assert subset.ranks == [1, 3]
    assert (subset.size(), subset.rank(), subset.included()) == (None, None, None)
    assert subset == ProcessSet((1, 3))
    assert subset != global_process_set
    assert "ranks=[1, 3]" in repr(subset)
    assert global_process_set.ranks is None
    assert ops.set_id(global_process_set) == ops.own_set_id(global_process_set, "this") == 0
    with pytest.raises(ValueError, match=r"\[1, 3\].*add_process_set"):
        ops.set_id(subset)
    with pytest.raises(TypeError, match=r"process_set=\[1, 3\] was found, a ProcessSet"):
        ops.own_set_id([1, 3], "this")  # type: ignore[arg-type]
    ops.check_root(3, 4, [1, 3])
    with pytest.raises(ValueError, match=r"root_rank=2 was found, one of the process set's ranks \[1, 3\]"):
        ops.check_root(2, 4, [1, 3])
