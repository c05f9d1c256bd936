"""What reductions of gradients share: their arguments, and which gradients are one unit."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from sparkvod.core import basics
from sparkvod.core.compression import NoneCompressor, TopK
from sparkvod.core.gradients import GradientPlan, check_predivide, chunks, groups_of
from sparkvod.core.ops import Average, Sum


class Doubling(GradientPlan):
    """As if one other rank had the same gradients."""

    def exchange(self, grads: list[Any], places: list[int], variables: Sequence[Any], size: int) -> None:
        assert size == 2
        for k in places:
            grads[k] = grads[k] * size


@pytest.mark.parametrize("factor", [0, -1.0, float("inf"), float("nan"), "2", True, None])
def test_factors_that_are_refused(factor: Any) -> None:
    with pytest.raises(ValueError, match="a positive one was expected"):
        check_predivide(factor, Average)


def test_a_factor_goes_with_averages_only() -> None:
    check_predivide(1.0, Sum)
    check_predivide(2, Average)
    with pytest.raises(ValueError, match="with op=Sum"):
        check_predivide(2, Sum)


def test_groups() -> None:
    assert groups_of(None, 0) is None
    assert groups_of(0, 0) is None
    assert groups_of(3, 0) == 3
    assert groups_of([("a",), ["b", "c"]], 0) == [["a"], ["b", "c"]]
    with pytest.warns(DeprecationWarning, match="use groups=") as told:
        assert groups_of(None, 2) == 2
    assert len(told) == 1
    for wrong in (-1, True, "ab", ["a"], 1.5):
        with pytest.raises(ValueError, match="lists of parameters were expected"):
            groups_of(wrong, 0, "parameters")


def test_compression_that_needs_the_optimizers_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"compression=TopK\(ratio=0.1\) was found.*\.bf16 was expected"):
        Doubling(TopK(0.1))


@pytest.mark.parametrize(
    ("number", "count", "lengths"), [(1, 3, [3]), (2, 5, [2, 3]), (3, 3, [1, 1, 1]), (9, 2, [1, 1]), (4, 0, [])]
)
def test_chunks(number: int, count: int, lengths: list[int]) -> None:
    parts = chunks(number, range(count))
    assert [len(part) for part in parts] == lengths
    assert [item for part in parts for item in part] == list(range(count))


def test_units() -> None:
    variables = [SimpleNamespace(shape=(number,)) for number in range(4)]

    def units(groups: Any, places: list[int], together: bool = True) -> list[list[int]]:
        return Doubling(NoneCompressor, groups=groups).units(places, variables, together)

    assert units(None, [0, 2]) == [[0, 2]]
    assert units(None, [0, 2], together=False) == [[0], [2]]
    assert units(2, [0, 1, 3]) == [[0], [1, 3]]
    assert units([[variables[3], variables[0]]], [0, 1, 3]) == [[0, 3], [1]]
    assert units(2, []) == units(None, [], together=False) == []
    with pytest.raises(ValueError, match=r"a variable of shape \(1,\) was found twice in groups"):
        units([variables[:2], [variables[1]]], [])
    with pytest.raises(ValueError, match="a str was found in groups"):
        units([["kernel"]], [])


def test_scales() -> None:
    assert Doubling(NoneCompressor, op=Sum).scales(4) == (Sum, 1.0, 1.0)
    op, before, after = Doubling(NoneCompressor, predivide=8.0).scales(4)
    assert (op, before, after) == (Sum, 1 / 8, 2.0)


def test_local_variables() -> None:
    plan = Doubling(NoneCompressor)
    one, other = object(), object()
    assert not plan.is_local(one)
    plan.register_local(one)
    assert plan.is_local(one)
    assert not plan.is_local(other)
    assert not Doubling(NoneCompressor).is_local(one)


@pytest.mark.parametrize(
    ("ranks", "scaled", "shared", "local"), [(1, True, 3.0, 5.0), (2, True, 6.0, 2.5), (2, False, 6.0, 5.0)]
)
def test_reduce(monkeypatch: pytest.MonkeyPatch, ranks: int, scaled: bool, shared: float, local: float) -> None:
    monkeypatch.setattr(basics, "world", lambda: SimpleNamespace(ranks_of=lambda members: list(range(ranks)), rank=0))
    plan = Doubling(NoneCompressor, scale_local=scaled)
    variables = [object(), object(), object()]
    plan.register_local(variables[2])
    given = [3.0, None, 5.0]
    assert plan.reduce(given, variables) == [shared, None, local]
    assert given == [3.0, None, 5.0]
