"""``Compression``: what happens to gradients on their way."""

from __future__ import annotations

from sparkvod.core.compression import CastCompressor, Compressor, NoneCompressor, cast_compressor
from sparkvod.torch import adapter

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]

FP16Compressor: type[CastCompressor] = cast_compressor("FP16Compressor", "float16", adapter, __name__)
BF16Compressor: type[CastCompressor] = cast_compressor("BF16Compressor", "bfloat16", adapter, __name__)


class Compression:
    """The compressors there are.

    Attributes:
        none: gradients travel as they are.
        fp16: floating-point gradients travel as float16; halves the bytes, overflows beyond 65,504.
        bf16: floating-point gradients travel as bfloat16; halves the bytes, keeps float32's range and 8 bits.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
