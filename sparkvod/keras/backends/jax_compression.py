"""``Compression`` of JAX's arrays."""

from __future__ import annotations

from typing import Any

from jax import numpy as jnp

from sparkvod.core.compression import CastCompressor, Compressors, cast_compressor


class _Caster:
    @staticmethod
    def is_floating(tensor: Any) -> bool:
        return bool(jnp.issubdtype(tensor.dtype, jnp.floating))

    @staticmethod
    def dtype(tensor: Any) -> Any:
        return tensor.dtype

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tensor.astype(dtype)


FP16Compressor: type[CastCompressor] = cast_compressor("FP16Compressor", "float16", _Caster, __name__)
BF16Compressor: type[CastCompressor] = cast_compressor("BF16Compressor", "bfloat16", _Caster, __name__)


class Compression(Compressors):
    """The compressors there are, as :class:`sparkvod.core.compression.Compressors` tells."""

    fp16 = FP16Compressor
    bf16 = BF16Compressor
