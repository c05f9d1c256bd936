"""``Compression``: what happens to gradients on their way."""

from __future__ import annotations

from sparkvod.core.compression import CastCompressor, Compressor, Compressors, NoneCompressor, cast_compressor
from sparkvod.torch import adapter

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]

FP16Compressor: type[CastCompressor] = cast_compressor("FP16Compressor", "float16", adapter, __name__)
BF16Compressor: type[CastCompressor] = cast_compressor("BF16Compressor", "bfloat16", adapter, __name__)


class Compression(Compressors):
    """The compressors there are, as :class:`sparkvod.core.compression.Compressors` tells."""

    fp16 = FP16Compressor
    bf16 = BF16Compressor
