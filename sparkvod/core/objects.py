"""Python objects over the engine, by cloudpickle: its channels are authenticated, only ranks write to them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import cloudpickle

from sparkvod._native import Engine, Memory
from sparkvod.core import basics, ops
from sparkvod.core.handles import Pending
from sparkvod.core.names import in_set, now
from sparkvod.core.process_sets import ProcessSet, global_process_set
from sparkvod.errors import MismatchError

_SIZE = struct.Struct("=q")
_UINT8 = ops.CODES["uint8"]
_INT32 = ops.CODES["int32"]
_INT64 = ops.CODES["int64"]
_PICKLED, _FAILED = b"\0", b"\1"


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the root's object on every rank; on the root, the object itself.

    Args:
        obj: anything that cloudpickle takes; read on the root only.
        root_rank: whose object it is.
        name: name of the operation, for messages; the same on all ranks.
        process_set: the ranks that take part, by default all.

    Raises:
        ValueError: the root, a rank of the world, is none of the set's, nor is this rank, or, on all ranks, the object
            cannot be pickled.
        HorovodInternalError: the collective failed.
    """
    engine, world = basics.engine(), basics.world()
    members = ops.own_set_id(process_set, "broadcast_object")
    ops.check_root(root_rank, world.size, world.ranks_of(members))
    if name is not None:
        ops.check_name(name)
    is_root = world.rank == root_rank
    data, error = _pickled(obj, world.rank) if is_root else (b"", None)

    def spread(used: str) -> tuple[int, Memory]:
        size = engine.allocate(_SIZE.size)
        if is_root:
            _write(size, _SIZE.pack(-len(data) if error else len(data)))  # below 0: bytes of an error's text
        _broadcast(engine, f"{used}.size", size, 1, _INT64, root_rank, members)
        (told,) = _SIZE.unpack(_read(size, _SIZE.size))
        body = engine.allocate(abs(told))
        if is_root:
            _write(body, data)
        _broadcast(engine, f"{used}.data", body, abs(told), _UINT8, root_rank, members)
        return told, body

    told, body = now("broadcast_object", name, spread, members)
    if told < 0:
        raise ValueError(_read(body, -told).decode()) from error
    return obj if is_root else cloudpickle.loads(_read(body, told))


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Returns the objects of all ranks that take part, in rank order; a rank that has joined has none.

    Args:
        obj: anything that cloudpickle takes.
        name: name of the operation, for messages; the same on all ranks.
        process_set: the ranks that take part, by default all.

    Raises:
        ValueError: this rank is none of the set's; or, on all ranks, when any rank's object cannot be pickled: names
            the first such rank and its error.
        HorovodInternalError: the collective failed.
    """
    return list(objects_by_rank(obj, name, process_set).values())


def objects_by_rank(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> dict[int, Any]:
    """As :func:`allgather_object`, by rank of the world, in rank order, without those that have joined."""
    engine, world = basics.engine(), basics.world()
    members = ops.own_set_id(process_set, "allgather_object")
    if name is not None:
        ops.check_name(name)
    pickled, error = _pickled(obj, world.rank)
    data = (_FAILED if error else _PICKLED) + pickled
    body = engine.allocate(len(data))
    _write(body, data)

    def gather(used: str) -> Any:
        handle = engine.allgather(f"{used}.data", body.address, [len(data)], _UINT8, False, members)
        return _wait(engine, handle, gathered=True)

    memory, lengths = now("allgather_object", name, gather, members)
    view = memoryview(memory)
    at = 0
    parts = {}
    for rank, length in zip(world.ranks_of(members), lengths, strict=True):
        if length:  # a rank that has not joined sends one byte at least
            parts[rank] = view[at : at + length]
        at += length
    for part in parts.values():
        if part[:1] == _FAILED:
            raise ValueError(bytes(part[1:]).decode()) from error
    return {rank: cloudpickle.loads(part[1:]) for rank, part in parts.items()}


def check_variables(described: Sequence[tuple[Sequence[int], str]], process_set: ProcessSet) -> None:
    """Checks that the ranks of a set have the same variables, before any is overwritten by another rank's.

    Args:
        described: shape and dtype of each of this rank's, in order.
        process_set: the ranks that take part.

    Raises:
        MismatchError: they differ; all ranks get it.
    """
    mine = [(list(shape), dtype) for shape, dtype in described]
    (first, ours), *others = objects_by_rank(mine, "broadcast.variables.alike", process_set).items()
    for rank, theirs in others:
        if theirs == ours:
            continue
        if len(theirs) != len(ours):
            what = f"rank {first} has {len(ours)} variables, rank {rank} has {len(theirs)}"
        else:
            k = next(k for k, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other)
            (shape, dtype), (other_shape, other_dtype) = ours[k], theirs[k]
            what = f"of variable {k} rank {first} has {dtype} {shape}, rank {rank} has {other_dtype} {other_shape}"
        raise MismatchError(f"the ranks' variables differ: {what}; the same model, built alike, was expected")


def _pickled(obj: Any, rank: int) -> tuple[bytes, Exception | None]:
    # An object that cannot be pickled must not leave the others waiting: its error's text travels in its place.
    try:
        return cloudpickle.dumps(obj), None
    except Exception as error:
        kind = type(obj)
        text = (
            f"the object of rank {rank}, a {kind.__module__}.{kind.__qualname__}, could not be pickled "
            f"({type(error).__name__}: {error}), one that cloudpickle takes was expected; send plain data in its place"
        )
        return text.encode(errors="replace"), error


def any_rank(value: bool, process_set: int = 0) -> bool:
    """Returns whether ``value`` is true on any rank of a set, given by its number; a collective of four bytes.

    Raises:
        HorovodInternalError: the collective failed.
    """
    engine, name = basics.engine(), in_set("any_rank", process_set)
    memory = engine.allocate(4)
    _write(memory, struct.pack("=i", bool(value)))
    _wait(
        engine,
        engine.allreduce(name, memory.address, memory.address, 1, _INT32, ops.Sum, 1.0, 1.0, [1], False, process_set),
    )
    (count,) = struct.unpack("=i", _read(memory, 4))
    return bool(count)


def _wait(engine: Engine, handle: int, gathered: bool = False) -> Any:
    finish = (lambda pending: engine.gathered(pending.handle)) if gathered else None
    return Pending(engine, handle, finish, None).wait()


def _broadcast(engine: Engine, name: str, memory: Memory, count: int, dtype: int, root_rank: int, members: int) -> None:
    address = memory.address
    _wait(engine, engine.broadcast(name, address, address, count, dtype, root_rank, [count], False, members))


def _write(memory: Memory, data: bytes) -> None:
    ctypes.memmove(memory.address, data, len(data))


def _read(memory: Memory, nbytes: int) -> bytes:
    return ctypes.string_at(memory.address, nbytes)
