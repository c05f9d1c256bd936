"""``Compression``: what happens to gradients on their way."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sparkvod.core.compression import CastCompressor, Compressor, Compressors, NoneCompressor, cast_compressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _Caster:
    @staticmethod
    def is_floating(tensor: Any) -> bool:
        return tensor.dtype.is_floating

    @staticmethod
    def dtype(tensor: Any) -> Any:
        return tensor.dtype

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tf.cast(tensor, dtype)


FP16Compressor: type[CastCompressor] = cast_compressor("FP16Compressor", "float16", _Caster, __name__)
BF16Compressor: type[CastCompressor] = cast_compressor("BF16Compressor", "bfloat16", _Caster, __name__)


class Compression(Compressors):
    """The compressors there are, as :class:`sparkvod.core.compression.Compressors` tells."""

    fp16 = FP16Compressor
    bf16 = BF16Compressor
