"""Collectives on any framework's tensors: what differs between frameworks is behind ``Adapter``.

Each function submits and returns a ``Pending``. ``wake=False`` says that the caller waits at once, so that the
engine's background thread need not be woken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sparkvod._native import Engine, Exchange, Memory
from sparkvod.core import basics, ops
from sparkvod.core.handles import Pending, abandon
from sparkvod.errors import HorovodInternalError


class Adapter(Protocol):
    """What the core must know of a framework. A tensor is the framework's own type.

    A *host tensor* lies contiguously in memory that the CPU can address.

    Attributes:
        exchange: tells the engine how host tensors lie, faster than :meth:`host` and :meth:`describe`; None where the
            framework has no such thing.
    """

    exchange: Exchange | None

    def host(self, tensor: Any) -> Any:
        """Returns the tensor itself if it is a host tensor, else a copy that is one.

        Raises:
            TypeError: it is no tensor.
            ValueError: it is one that cannot be sent, a sparse one for example.
        """

    def describe(self, tensor: Any) -> tuple[int, int, int, Sequence[int]]:
        """Returns address, number of elements, code of the dtype and shape of a host tensor.

        Raises:
            ValueError: the dtype has no code.
        """

    def empty_like(self, tensor: Any) -> Any:
        """Returns a host tensor of the same shape and dtype, not initialised."""

    def empty_rows(self, tensor: Any, rows: int) -> Any:
        """Returns a host tensor of ``rows`` rows of the tensor's, not initialised."""

    def copy_into(self, target: Any, source: Any) -> None:
        """Copies ``source`` into ``target``, which may lie on any device and need not be contiguous."""

    def place_like(self, tensor: Any, like: Any) -> Any:
        """Returns a host tensor on the device of ``like``: itself when that is the host."""

    def from_memory(self, memory: Memory, like: Any, rows: int) -> Any:
        """Returns a host tensor over ``memory`` (kept alive by it), of ``like``'s dtype and ``rows`` rows of its shape.

        A scalar counts as one row of no dimensions.
        """


def allreduce(
    adapter: Adapter,
    tensor: Any,
    name: str,
    op: int,
    prescale: float = 1.0,
    postscale: float = 1.0,
    *,
    in_place: bool,
    wake: bool = True,
    process_set: int = 0,
) -> Pending:
    """Reduces over the ranks; the result is the tensor itself, or a new one of its shape."""
    engine = basics.engine()
    if in_place:
        handle = _allreduce_seen(engine, adapter, tensor, name, op, prescale, postscale, wake, process_set)
        if handle is not None:
            return Pending(engine, handle, None, tensor)
    return _allreduce_arranged(engine, adapter, tensor, name, op, prescale, postscale, in_place, wake, process_set)


def allreduce_now(
    adapter: Adapter,
    tensor: Any,
    name: str,
    op: int,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: int = 0,
) -> Any:
    """Reduces in place, waits and returns the tensor: :func:`allreduce` with nothing made on the way."""
    engine = basics.engine()
    handle = _allreduce_seen(engine, adapter, tensor, name, op, prescale, postscale, False, process_set)
    if handle is None:
        return _allreduce_arranged(
            engine, adapter, tensor, name, op, prescale, postscale, True, False, process_set
        ).wait()
    try:
        engine.wait(handle)
    except BaseException:
        abandon(Pending(engine, handle, None, tensor))
        raise
    engine.release(handle)
    return tensor


def _allreduce_seen(
    engine: Engine,
    adapter: Adapter,
    tensor: Any,
    name: str,
    op: int,
    prescale: float,
    postscale: float,
    wake: bool,
    process_set: int,
) -> int | None:
    # Starts an allreduce in place of what the adapter's exchange can see, else nothing.
    exchange = adapter.exchange
    if exchange is None:
        return None
    try:
        return engine.allreduce_tensor(name, tensor, exchange, op, prescale, postscale, wake, process_set)
    except TypeError as error:
        raise ops.explained(error, name, prescale, postscale) from None
    except HorovodInternalError:
        raise
    except RuntimeError:  # the framework's own, of a tensor that its table cannot describe: the adapter says why
        return None


def _allreduce_arranged(
    engine: Engine,
    adapter: Adapter,
    tensor: Any,
    name: str,
    op: int,
    prescale: float,
    postscale: float,
    in_place: bool,
    wake: bool,
    process_set: int,
) -> Pending:
    # Starts an allreduce of any tensor, by way of host tensors.
    source, output, finish = _arrange(adapter, tensor, in_place)
    address, count, dtype, shape = adapter.describe(source)
    to = address if output is source else adapter.describe(output)[0]
    try:
        handle = engine.allreduce(name, address, to, count, dtype, op, prescale, postscale, shape, wake, process_set)
    except TypeError as error:
        raise ops.explained(error, name, prescale, postscale) from None
    return Pending(engine, handle, finish, (tensor, source, output))


def grouped_allreduce(
    adapter: Adapter,
    tensors: Sequence[Any],
    name: str,
    op: int,
    prescale: float = 1.0,
    postscale: float = 1.0,
    *,
    in_place: bool,
    wake: bool = True,
    process_set: int = 0,
) -> Pending:
    """Reduces several tensors as one unit; the result is the list of what :func:`allreduce` would give."""
    engine = basics.engine()
    arranged = [(tensor, *_arrange(adapter, tensor, in_place)) for tensor in tensors]
    entries = []
    for _, source, output, _ in arranged:
        address, count, dtype, shape = adapter.describe(source)
        to = address if output is source else adapter.describe(output)[0]
        entries.append((address, to, count, dtype, shape))
    if in_place:
        ops.check_distinct([(to, count) for _, to, count, _, _ in entries], name)
    try:
        handle = engine.grouped_allreduce(name, entries, op, prescale, postscale, wake, process_set)
    except TypeError as error:
        raise ops.explained(error, name, prescale, postscale) from None

    def finish(_: Pending) -> list[Any]:
        return [
            end(Pending(engine, handle, None, (tensor, source, output))) for tensor, source, output, end in arranged
        ]

    return Pending(engine, handle, finish, arranged)


def broadcast(
    adapter: Adapter, tensor: Any, name: str, root_rank: int, *, in_place: bool, wake: bool = True, process_set: int = 0
) -> Pending:
    """Copies the root's tensor to all ranks; the result is the tensor itself, or a new one of its shape."""
    engine = basics.engine()
    ops.check_root(root_rank, basics.size(), basics.world().ranks_of(process_set) if process_set else None)
    source, output, finish = _arrange(adapter, tensor, in_place)
    address, count, dtype, shape = adapter.describe(source)
    to = address if output is source else adapter.describe(output)[0]
    try:
        handle = engine.broadcast(name, address, to, count, dtype, root_rank, shape, wake, process_set)
    except TypeError as error:
        raise ops.explained(error, name) from None
    return Pending(engine, handle, finish, (tensor, source, output))


def allgather(adapter: Adapter, tensor: Any, name: str, *, wake: bool = True, process_set: int = 0) -> Pending:
    """Concatenates the ranks' tensors along dimension 0; the result is (tensor, list of each rank's rows)."""
    engine = basics.engine()
    source = adapter.host(tensor)
    address, _, dtype, shape = adapter.describe(source)
    try:
        handle = engine.allgather(name, address, shape if len(shape) else [1], dtype, wake, process_set)
    except TypeError as error:
        raise ops.explained(error, name) from None

    def finish(pending: Pending) -> tuple[Any, list[int]]:
        memory, rows = engine.gathered(pending.handle)
        return adapter.place_like(adapter.from_memory(memory, source, sum(rows)), tensor), rows

    return Pending(engine, handle, finish, (tensor, source))


def grouped_allgather(
    adapter: Adapter, tensors: Sequence[Any], name: str, *, wake: bool = True, process_set: int = 0
) -> Pending:
    """Gathers several tensors as one unit; the result is the list of what :func:`allgather` would give."""
    engine = basics.engine()
    sources = [adapter.host(tensor) for tensor in tensors]
    entries = []
    for source in sources:
        address, _, dtype, shape = adapter.describe(source)
        entries.append((address, shape if len(shape) else [1], dtype))
    try:
        handle = engine.grouped_allgather(name, entries, wake, process_set)
    except TypeError as error:
        raise ops.explained(error, name) from None

    def finish(pending: Pending) -> list[tuple[Any, list[int]]]:
        return [
            (adapter.place_like(adapter.from_memory(memory, source, sum(rows)), tensor), rows)
            for (memory, rows), source, tensor in zip(engine.outputs(pending.handle), sources, tensors, strict=True)
        ]

    return Pending(engine, handle, finish, (tensors, sources))


def reducescatter(
    adapter: Adapter,
    tensors: Sequence[Any],
    name: str,
    op: int,
    prescale: float = 1.0,
    postscale: float = 1.0,
    *,
    wake: bool = True,
    process_set: int = 0,
) -> Pending:
    """Reduces several tensors as one unit and leaves each rank its rows; the result is the list of these.

    Of ``n`` rows each rank gets ``n // size`` and the first ``n % size`` ranks one more.
    """
    engine = basics.engine()
    ranks = basics.world().ranks_of(process_set)
    size = len(ranks)
    place = ranks.index(basics.rank()) if basics.rank() in ranks else size
    arranged = []
    entries = []
    for tensor in tensors:
        source = adapter.host(tensor)
        address, _, dtype, shape = adapter.describe(source)
        rows = shape[0] // size + (place < shape[0] % size) if len(shape) else 0
        output = adapter.empty_rows(source, rows)
        entries.append((address, adapter.describe(output)[0], shape, dtype))
        arranged.append((tensor, source, output))
    try:
        handle = engine.grouped_reducescatter(name, entries, op, prescale, postscale, wake, process_set)
    except TypeError as error:
        raise ops.explained(error, name, prescale, postscale) from None
    return Pending(
        engine, handle, lambda _: [adapter.place_like(output, tensor) for tensor, _, output in arranged], arranged
    )


def alltoall(
    adapter: Adapter,
    tensor: Any,
    name: str,
    splits: Sequence[int] | None = None,
    *,
    wake: bool = True,
    process_set: int = 0,
) -> Pending:
    """Sends rows to every rank; the result is (tensor of what came, in the order of the ranks, rows of each rank).

    ``splits`` says how many rows go to each rank; None: equally many.
    """
    engine = basics.engine()
    source = adapter.host(tensor)
    address, _, dtype, shape = adapter.describe(source)
    if splits is not None and len(splits) == 0:
        raise ValueError("no splits were found, one for each rank was expected")
    try:
        handle = engine.alltoall(name, address, shape, dtype, splits or (), wake, process_set)
    except TypeError as error:
        raise ops.explained(error, name) from None

    def finish(pending: Pending) -> tuple[Any, list[int]]:
        memory, rows = engine.gathered(pending.handle)
        return adapter.place_like(adapter.from_memory(memory, source, sum(rows)), tensor), rows

    return Pending(engine, handle, finish, (tensor, source))


def join(average_over: str) -> int:
    """Returns, when all ranks have called it, the last one that did; this rank is neutral in what the others do.

    Raises:
        ValueError: ``average_over`` is neither "all" nor "active".
    """
    if average_over not in ("all", "active"):
        raise ValueError(f"average_over={average_over!r} was found, 'all' or 'active' was expected")
    engine = basics.engine()
    return Pending(
        engine, engine.join(average_over == "active", False), lambda pending: engine.last_joined(pending.handle), None
    ).wait()


def barrier(name: str, process_set: int = 0) -> None:
    """Returns when all ranks of the set have called it."""
    engine = basics.engine()
    try:
        handle = engine.barrier(name, False, process_set)
    except TypeError as error:
        raise ops.explained(error, name) from None
    Pending(engine, handle, None, None).wait()


def _arrange(adapter: Adapter, tensor: Any, in_place: bool) -> tuple[Any, Any, Any]:
    # Where the engine reads, where it writes, and what makes the result of that.
    source = adapter.host(tensor)
    if source is tensor:
        return source, source if in_place else adapter.empty_like(source), _output
    if not in_place:
        return source, source, lambda pending: adapter.place_like(pending.keep[2], tensor)

    def copy_back(pending: Pending) -> Any:
        adapter.copy_into(tensor, pending.keep[2])
        return tensor

    return source, source, copy_back


def _output(pending: Pending) -> Any:
    return pending.keep[2]
