"""Compression of gradients on the wire. The arithmetic is the framework's; the classes are made here.

There are two kinds. A *compressor* looks at single elements and can be used for any tensor: casts, what users bring. A
*lossy* stage (:class:`TopK`, :class:`PowerSGD`) leaves most of a gradient out, and is right only because what was left
out is kept and added to the next step's gradient (error feedback): so it belongs to an optimizer, which has steps. A
chain is one lossy stage or none, and compressors for what it sends.
"""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol


class Caster(Protocol):
    """What a framework must offer for compression by casting."""

    def is_floating(self, tensor: Any) -> bool:
        """Returns whether the elements are real floating-point numbers."""

    def dtype(self, tensor: Any) -> Any:
        """Returns the framework's dtype of the tensor."""

    def cast(self, tensor: Any, dtype: Any) -> Any:
        """Returns the tensor in another dtype (the framework's, or a name of ``ops.DTYPES``), itself if it is in it."""


class Compressor(ABC):
    """Interface of a compressor; a script may bring its own subclass, which has both methods.

    Attributes:
        wire: name of the dtype that floating-point elements have on the wire, None when they keep their own. A
            compressor that does anything else than cast leaves it out and is called for each gradient.
    """

    @classmethod
    @abstractmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Returns what is sent, and what ``decompress`` needs to know."""

    @classmethod
    @abstractmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Returns what was received in the form that was given to ``compress``."""


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


@dataclass(frozen=True)
class TopK:
    """Of each gradient only the largest elements travel, with their places; the others wait for the next step.

    Args:
        ratio: how many of a gradient's elements, at least one; above 0, at most 1.

    Raises:
        TypeError: it is no number.
        ValueError: it is out of range.
    """

    ratio: float

    def __post_init__(self) -> None:
        ratio: Any = self.ratio
        if isinstance(ratio, bool) or not isinstance(ratio, numbers.Real):
            raise TypeError(f"ratio={ratio!r} was found, a number above 0 and at most 1 was expected")
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio={self.ratio} was found, a number above 0 and at most 1 was expected")

    def count(self, elements: int) -> int:
        """Returns how many of so many elements travel."""
        return min(elements, max(1, math.ceil(self.ratio * elements)))


@dataclass(frozen=True)
class PowerSGD:
    """Of a gradient with two dimensions or more only its two factors of a low rank travel (Vogels et al., 2019).

    A gradient that has one dimension, or whose factors would not be smaller, travels as it is.

    Args:
        rank: columns of the factors.
        start_step: steps in the beginning whose gradients travel as they are, while they change fast.

    Raises:
        TypeError: one of them is no whole number.
        ValueError: ``rank`` is below 1, ``start_step`` below 0.
    """

    rank: int
    start_step: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("start_step", 0)):
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                raise TypeError(f"{name}={value!r} was found, a whole number of at least {least} was expected")
            if value < least:
                raise ValueError(f"{name}={value} was found, a whole number of at least {least} was expected")

    def factors(self, shape: Any) -> tuple[int, int] | None:
        """Returns rows and columns of the matrix that a gradient of this shape is taken for; None if it is none."""
        if len(shape) < 2 or 0 in shape:
            return None
        rows, columns = shape[0], math.prod(shape[1:])
        return (rows, columns) if (rows + columns) * self.rank < rows * columns else None


Lossy = TopK | PowerSGD


@dataclass(frozen=True)
class Chain:
    """Stages one after the other, as :func:`chain` makes them."""

    stages: tuple[Any, ...]

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Returns what the last stage sends, and what the stages need to know to undo it."""
        contexts = []
        for stage in self.stages:
            tensor, context = stage.compress(tensor)
            contexts.append(context)
        return tensor, contexts

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Undoes the stages, the last one first."""
        for stage, context in zip(reversed(self.stages), reversed(ctx), strict=True):
            tensor = stage.decompress(tensor, context)
        return tensor

    def __repr__(self) -> str:
        return " + ".join(map(described, self.stages))


def chain(*stages: Any) -> Any:
    """Returns what compresses by one stage after the other.

    Args:
        *stages: at first :class:`TopK` or :class:`PowerSGD`, if at all, and then any number of compressors that look at
            single elements, such as ``Compression.fp16``: they get what the first stage sends.

    Raises:
        TypeError: a stage is no compression.
        ValueError: there is none, or a lossy stage that is not the first.
    """
    flat = [one for stage in stages for one in (stage.stages if isinstance(stage, Chain) else (stage,))]
    if not flat:
        raise ValueError("a chain of nothing was found, at least one stage was expected, as Compression.fp16")
    for place, stage in enumerate(flat):
        check_compressor(stage, lossy=True)
        if place and isinstance(stage, Lossy):
            raise ValueError(
                f"{stage} was found at place {place} of a chain, at its beginning it was expected: it works on "
                "gradients, not on what another stage made of them; put it first, once"
            )
    flat = [stage for stage in flat if stage is not NoneCompressor]
    return NoneCompressor if not flat else flat[0] if len(flat) == 1 else Chain(tuple(flat))


def lossy_and_compressor(compression: Any) -> tuple[Lossy | None, Any]:
    """Returns the lossy stage, None if there is none, and the compressor of what is sent."""
    stages = compression.stages if isinstance(compression, Chain) else (compression,)
    if not isinstance(stages[0], Lossy):
        return None, compression
    return stages[0], chain(*stages[1:]) if stages[1:] else NoneCompressor


def described(compression: Any) -> str:
    """Returns the name of a compression, with its parameters: equal where two compressions are."""
    if isinstance(compression, Chain | Lossy):
        return repr(compression)
    return str(getattr(compression, "__qualname__", type(compression).__qualname__))


def check_compressor(compression: Any, lossy: bool = False) -> None:
    """Checks an argument ``compression``.

    Args:
        compression: the argument.
        lossy: whether a lossy stage can be used.

    Raises:
        TypeError: it is no compression.
        ValueError: it has a lossy stage, and none can be used.
    """
    is_lossy = lossy_and_compressor(compression)[0] is not None
    if is_lossy and not lossy:
        raise ValueError(
            f"compression={compression} was found, which adds to each step what the steps before left out, so that it "
            "works in sparkvod.torch's DistributedOptimizer and in TorchEstimator only; Compression.none, .fp16 or "
            ".bf16 was expected here"
        )
    if not is_lossy and not all(_has(compression, method) for method in ("compress", "decompress")):
        usable = ".fp16, .bf16, .topk(ratio), .powersgd(rank)" if lossy else ".fp16, .bf16"
        raise TypeError(
            f"compression={compression!r} was found, one of Compression.none, {usable}, a chain of these, or a class "
            "with compress and decompress was expected"
        )


def _has(compression: Any, name: str) -> bool:
    """Tells whether the method is there; a subclass of :class:`Compressor` may have left it out."""
    method = getattr(compression, name, None)
    return callable(method) and not getattr(method, "__isabstractmethod__", False)


class Compressors:
    """The compressors there are; a framework's ``Compression`` has them all.

    Attributes:
        none: gradients travel as they are.
        fp16: floating-point gradients travel as float16; halves the bytes, overflows beyond 65,504.
        bf16: floating-point gradients travel as bfloat16; halves the bytes, keeps float32's range and 8 bits.
        topk: ``topk(ratio)``: the largest elements travel; :class:`TopK`.
        powersgd: ``powersgd(rank, start_step=0)``: factors of a low rank travel; :class:`PowerSGD`.
        chain: ``chain(powersgd(4), fp16)``: one after the other; :func:`chain`.
    """

    none = NoneCompressor
    fp16: type[CastCompressor]
    bf16: type[CastCompressor]
    topk = TopK
    powersgd = PowerSGD
    chain = staticmethod(chain)


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
    compress = getattr(getattr(compressor, "compress", None), "__func__", None)
    return compress is NoneCompressor.compress.__func__ or compress is CastCompressor.compress.__func__  # type: ignore[attr-defined]
