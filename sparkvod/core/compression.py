"""Compression of gradients on the wire. The arithmetic is the framework's; the classes are made here."""

from __future__ import annotations

from typing import Any, Protocol


class Caster(Protocol):
    """What a framework must offer for compression by casting."""

    def is_floating(self, tensor: Any) -> bool:
        """Returns whether the elements are real floating-point numbers."""

    def dtype(self, tensor: Any) -> Any:
        """Returns the framework's dtype of the tensor."""

    def cast(self, tensor: Any, dtype: Any) -> Any:
        """Returns the tensor in another dtype (the framework's, or a name of ``ops.DTYPES``), itself if it is in it."""


class Compressor:
    """Interface of a compressor; a script may bring its own subclass.

    Attributes:
        wire: name of the dtype that floating-point elements have on the wire, None when they keep their own. A
            compressor that does anything else than cast leaves it out and is called for each gradient.
    """

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Returns what is sent, and what ``decompress`` needs to know."""
        raise NotImplementedError

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Returns what was received in the form that was given to ``compress``."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    wire: str | None = None

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor itself."""
        return tensor, None

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Returns the tensor itself."""
        return tensor


class CastCompressor(Compressor):
    """Sends floating-point tensors in the dtype named by ``wire``, others as they are."""

    wire: str | None
    caster: Caster

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor in the dtype of the wire, and its own dtype."""
        if not cls.caster.is_floating(tensor):
            return tensor, None
        return cls.caster.cast(tensor, cls.wire), cls.caster.dtype(tensor)

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Returns the tensor in its own dtype."""
        return tensor if ctx is None else cls.caster.cast(tensor, ctx)


class Compressors:
    """The compressors there are; a framework's ``Compression`` has them all.

    Attributes:
        none: gradients travel as they are.
        fp16: floating-point gradients travel as float16; halves the bytes, overflows beyond 65,504.
        bf16: floating-point gradients travel as bfloat16; halves the bytes, keeps float32's range and 8 bits.
    """

    none = NoneCompressor
    fp16: type[CastCompressor]
    bf16: type[CastCompressor]


def cast_compressor(class_name: str, wire: str, caster: Any, module: str) -> type[CastCompressor]:
    """Returns a compressor class.

    Args:
        class_name: its name.
        wire: dtype on the wire, a name of ``ops.DTYPES``.
        caster: the framework's :class:`Caster`, an object or a module.
        module: name of the module that will hold the class under its name, so that it can be pickled.
    """
    doc = f"Sends floating-point tensors as {wire}."
    members = {"wire": wire, "caster": caster, "__doc__": doc, "__module__": module}
    return type(class_name, (CastCompressor,), members)


def only_casts(compressor: Any) -> bool:
    """Returns whether the compressor does nothing but cast, so that a bucket can be kept in the wire's dtype."""
    compress = getattr(compressor.compress, "__func__", None)
    return compress is NoneCompressor.compress.__func__ or compress is CastCompressor.compress.__func__  # type: ignore[attr-defined]
