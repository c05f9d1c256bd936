from __future__ import annotations

from typing import Any

from sparkvod.core.compression import Compressor, NoneCompressor, cast_compressor, only_casts


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
