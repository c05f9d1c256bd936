from __future__ import annotations

from typing import Any

import pytest

from sparkvod.core.compression import (
    Compressor,
    Compressors,
    NoneCompressor,
    PowerSGD,
    TopK,
    cast_compressor,
    chain,
    check_compressor,
    described,
    lossy_and_compressor,
    only_casts,
)


class Text:
    """A framework whose tensors are (value, dtype) pairs."""

    @staticmethod
    def is_floating(tensor: Any) -> bool:
        return tensor[1].startswith("float")

    @staticmethod
    def dtype(tensor: Any) -> str:
        return tensor[1]

    @staticmethod
    def cast(tensor: Any, dtype: str) -> Any:
        return tensor[0], dtype


def test_cast() -> None:
    half = cast_compressor("Half", "float16", Text, __name__)
    assert half.compress((1, "float64")) == ((1, "float16"), "float64")
    assert half.decompress((1, "float16"), "float64") == (1, "float64")
    assert half.compress((1, "int32")) == ((1, "int32"), None)
    assert half.decompress((1, "int32"), None) == (1, "int32")
    assert half.__name__ == "Half"


def test_only_casts() -> None:
    half = cast_compressor("Half", "float16", Text, __name__)

    class Quantized(NoneCompressor):
        @classmethod
        def compress(cls, tensor: Any) -> Any:
            return tensor, None

    assert only_casts(half)
    assert only_casts(NoneCompressor)
    assert not only_casts(Quantized)
    assert not only_casts(Compressor)
    assert not only_casts(TopK(0.5))


class Doubled(Compressor):
    @classmethod
    def compress(cls, tensor: Any) -> Any:
        return (tensor[0] * 2, tensor[1]), "doubled"

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        assert ctx == "doubled"
        return tensor[0] / 2, tensor[1]


def test_chains() -> None:
    half = cast_compressor("Half", "float16", Text, __name__)
    both = chain(Doubled, half)
    sent, context = both.compress((3, "float32"))
    assert sent == (6, "float16")
    assert both.decompress(sent, context) == (3, "float32")
    assert described(both) == "Doubled + Half"
    assert chain(half) is chain(NoneCompressor, half) is chain(half, NoneCompressor) is half
    assert chain(NoneCompressor) is NoneCompressor
    thin = chain(PowerSGD(4), both)
    assert repr(thin) == described(thin) == "PowerSGD(rank=4, start_step=0) + Doubled + Half"
    lossy, rest = lossy_and_compressor(thin)
    assert lossy == PowerSGD(4)
    assert described(rest) == "Doubled + Half"
    assert lossy_and_compressor(chain(TopK(0.1), half)) == (TopK(0.1), half)
    assert lossy_and_compressor(TopK(0.1)) == (TopK(0.1), NoneCompressor)
    assert lossy_and_compressor(half) == (None, half)
    assert chain(TopK(0.1), half) == chain(TopK(0.1), half) != chain(TopK(0.2), half)
    for wrong, error, words in (
        ((), ValueError, "at least one stage"),
        ((half, TopK(0.1)), ValueError, r"TopK\(ratio=0.1\) was found at place 1.*put it first"),
        ((TopK(0.1), PowerSGD(1)), ValueError, "put it first"),
        ((half, 5), TypeError, "compression=5"),
    ):
        with pytest.raises(error, match=words):
            chain(*wrong)


class Half(Compressor):
    """One that its author forgot to finish."""

    @classmethod
    def compress(cls, tensor: Any) -> Any:
        return tensor, None


def test_bad_values() -> None:
    for ratio, error in ((0, ValueError), (2, ValueError), (-0.1, ValueError), ("1", TypeError), (True, TypeError)):
        with pytest.raises(error, match=rf"ratio={ratio!r} was found, a number above 0 and at most 1"):
            Compressors.topk(ratio)
    with pytest.raises(ValueError, match="ratio=nan"):
        Compressors.topk(float("nan"))
    for rank, error in ((0, ValueError), (-1, ValueError), (1.5, TypeError), (None, TypeError), (True, TypeError)):
        with pytest.raises(error, match=f"rank={rank} was found, a whole number of at least 1"):
            Compressors.powersgd(rank)
    with pytest.raises(ValueError, match="start_step=-1"):
        Compressors.powersgd(1, start_step=-1)
    for wrong in (5, None, "fp16", TopK, object(), Compressor, Half):
        with pytest.raises(TypeError, match=r"compression=.* was found, one of Compression\.none.*topk"):
            check_compressor(wrong, lossy=True)
        with pytest.raises(TypeError, match=r"one of Compression\.none, \.fp16, \.bf16, a chain of these"):
            check_compressor(wrong)
    for wrong in (TopK(0.1), chain(TopK(0.1), Doubled)):
        check_compressor(wrong, lossy=True)
        with pytest.raises(ValueError, match=r"compression=TopK\(ratio=0.1\).*DistributedOptimizer"):
            check_compressor(wrong)


def test_how_much_travels() -> None:
    assert [TopK(0.01).count(n) for n in (0, 1, 100, 101)] == [0, 1, 1, 2]
    assert TopK(1).count(7) == 7
    assert PowerSGD(2).factors((8, 4, 2)) == (8, 8)
    assert PowerSGD(4).factors((8, 8)) is None  # as many elements as the matrix
    assert PowerSGD(1).factors((9,)) is None
    assert PowerSGD(1).factors((9, 0)) is None
