"""The world of this process: made by ``init``, ended by ``shutdown``, one at a time."""

from __future__ import annotations

import atexit
import hmac
import importlib
import itertools
import os
import secrets
import struct
import threading
from typing import Any

import sparkvod
from sparkvod import config, log
from sparkvod._native import Engine, set_current
from sparkvod.core import autotune, stacks
from sparkvod.core.scripts import Watch
from sparkvod.errors import HorovodInternalError, NotInitializedError, PeerLostError
from sparkvod.launch import context as launch_context
from sparkvod.launch import environment
from sparkvod.observe import metrics, timeline

_HEADER = struct.Struct("<BB")  # lengths of the version and of the secret
_SECRET_BYTES = 32
_REFUSAL = b"refused: "  # what an endpoint of a rank that cannot listen begins with
_WORDS = 1000  # characters of an error's text that the other ranks are told

_lock = threading.RLock()
_world: World | None = None
_watch: Watch | None = None
_generations = itertools.count(1)
_last_environment: launch_context.WorldContext | None = None


class World:
    """This process's membership in a world.

    Attributes:
        engine: the connected engine; None in a process forked from the rank, which may read the ranks but not
            communicate.
        generation: number of this ``init`` within the process; what was made for another world is stale.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine: Engine | None = engine
        self.generation = next(_generations)
        self.rank: int = engine.rank
        self.size: int = engine.size
        self.local_rank: int = engine.local_rank
        self.local_size: int = engine.local_size
        self.cross_rank: int = engine.cross_rank
        self.cross_size: int = engine.cross_size
        self.is_homogeneous: bool = engine.is_homogeneous
        self.metrics: metrics.Endpoint | None = None
        self.autotuner: autotune.Autotuner | None = None
        self.process_sets: dict[int, list[int]] = {0: list(range(engine.size))}
        self._counters: dict[str, itertools.count[int]] = {}
        self._idle: dict[str, list[str]] = {}

    def ranks_of(self, process_set: int) -> list[int]:
        """Returns the sorted ranks of a registered process set."""
        return self.process_sets[process_set]

    def number(self, kind: str) -> int:
        """Returns the next number of a kind: 0, 1, … The same on all ranks that ask in the same order."""
        counter = self._counters.get(kind)
        if counter is None:
            counter = self._counters.setdefault(kind, itertools.count())
        return next(counter)

    def new_name(self, kind: str) -> str:
        """Returns a name that no operation had: ``<kind>.noname.<n>``."""
        return f"{kind}.noname.{self.number(kind)}"

    def borrow_name(self, kind: str) -> str:
        """Returns the name for an operation that the caller waits for; :meth:`return_name` gives it back.

        There is one for each kind, so that the n-th operation without a name is the n-th of every rank, and the
        engine's response cache knows it.

        Raises:
            ValueError: another one waits for such an operation at this moment, in another thread. Which is first is
                chance, and may be another one on other ranks: the world ends, before two that differ are taken for one.
        """
        idle = self._idle.get(kind)
        if idle is None:
            idle = self._idle.setdefault(kind, [f"{kind}.noname.sync"])
        try:
            return idle.pop()  # atomic
        except IndexError:
            if self.size == 1:  # nobody to disagree with
                return f"{kind}.noname.sync{self.number(kind + '.sync')}"
            raise self._overlap(kind) from None

    def _overlap(self, kind: str) -> ValueError:
        words = (
            f"two threads have each called {kind} without a name at the same time, whose order the other ranks cannot "
            "know: pass name=, the same on all ranks and another one in each thread, or call it from one thread"
        )
        if self.engine is not None:
            self.engine.abort(f"rank {self.rank}: {words}")
        return ValueError(words)

    def return_name(self, kind: str, name: str) -> None:
        """Gives back what :meth:`borrow_name` gave."""
        self._idle[kind].append(name)


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Joins the world that the launcher, or the environment, describes. Does nothing when there already is one.

    Args:
        comm: for compatibility: None or an empty list, which both mean all ranks.
        process_sets: process sets to register, a list of ``ProcessSet``, the same on all ranks; None, or "dynamic",
            which the peer needs for ``add_process_set``: none now.

    Raises:
        ValueError: ``comm`` asks for more, ``process_sets`` are wrong, or the environment is inconsistent.
        CollectiveTimeoutError: not all ranks came within the start time-out.
        PeerLostError: another rank could not listen or connect; the message names it, and why.
        HorovodInternalError: this rank could not, as for want of descriptors.
    """
    global _watch, _world
    with _lock:
        # A world whose engine has failed is left for a new one. A forked child has no engine, and no right to a world.
        if _world is not None and (_world.engine is None or _world.engine.running):
            return
        _check_whole_world(comm)
        # Not at the top: a set is about the world, which is here.
        from sparkvod.core import process_sets as sets

        wanted = sets.check(process_sets)
        tuner = autotune.settings()
        if _world is not None:
            shutdown()
        context = launch_context.current() or _environment()
        if context.rank == 0:
            for variable, meant in config.misspelt().items():
                log.get("core").warning("%s was found, which is no knob; if %s is meant, correct it", variable, meant)
        _world = World(_connect(context, autotune.overrides(tuner)))
        set_current(_world.engine)
        _start_timeline(_world)
        _world.metrics = _start_metrics(_world)
        if tuner.on and _world.rank == 0 and _world.engine is not None:
            _world.autotuner = autotune.Autotuner(_world.engine, tuner)
        if launch_context.current() is not None:
            launch_context.on_exit(_end_of_function)
        elif _world.size > 1:
            _watch = Watch(_end_of_script)
        log.get("core").debug("rank %d of %d joined", _world.rank, _world.size)
        try:
            for process_set in wanted:
                sets.add_process_set(process_set)
        except BaseException:
            shutdown()
            raise


def _start_timeline(world: World) -> None:
    path = config.get("timeline")
    if not path or path == "DYNAMIC" or world.engine is None:
        return
    try:
        world.engine.start_timeline(timeline.path_of(path, world.rank), config.get("timeline_mark_cycles"))
    except ValueError as e:  # a timeline that cannot be written costs a warning, never the job
        log.get("core").warning("SPARKVOD_TIMELINE: %s", e)


def _start_metrics(world: World) -> metrics.Endpoint | None:
    first = config.get("metrics_port")
    if first == 0 or world.engine is None:
        return None
    labels = {"rank": str(world.rank), "size": str(world.size)}
    engine = world.engine
    try:
        endpoint = metrics.Endpoint(
            config.get("metrics_address"), first + world.local_rank, lambda: metrics.render(engine.stats(), labels)
        )
    except OSError as e:  # counters that nobody can read cost a warning, never the job
        log.get("core").warning("SPARKVOD_METRICS_PORT: port %d: %s", first + world.local_rank, e)
        return None
    return endpoint


def _environment() -> launch_context.WorldContext:
    # The same object for the same world, because its all-gather counts how often it was called.
    global _last_environment
    found = environment.from_environment()
    last = _last_environment
    if last is None or (last.rank, last.size, last.secret) != (found.rank, found.size, found.secret):
        _last_environment = last = found
    return last


def _check_whole_world(comm: Any) -> None:
    if comm is not None and comm != []:
        raise ValueError(
            f"comm={comm!r} was found, None was expected: a world of some of the ranks, or of an MPI communicator, "
            "is not supported; start as many processes as the world shall have and leave comm out"
        )


def _connect(context: launch_context.WorldContext, overrides: dict[str, Any]) -> Engine:
    if config.get("tls"):
        # The engine looks for OpenSSL by its name. A Python that has one in a folder of its own loads it from there.
        importlib.import_module("ssl")
    engine = Engine(config.engine_config(**overrides))
    stacks.show_when_late(engine)
    try:
        # Fresh for each world, so that what a rank of an earlier one proves is worth nothing here.
        drawn = secrets.token_bytes(_SECRET_BYTES) if context.rank == 0 else b""
        refusal: Exception | None = None
        try:
            endpoint = engine.listen()
        except (ValueError, HorovodInternalError) as e:
            # Told in place of the endpoint, or the others would wait for it until their deadline.
            refusal, endpoint = e, _REFUSAL + str(e).encode(errors="replace")
        messages = context.allgather(_pack(sparkvod.__version__, drawn, endpoint))
        unpacked = [_unpack(message) for message in messages]
        _check_versions([version for version, _, _ in unpacked])
        if refusal is not None:
            raise type(refusal)(f"rank {context.rank} cannot listen: {refusal}") from refusal
        _check_refusals([endpoint for _, _, endpoint in unpacked])
        secret = unpacked[0][1]
        if context.secret is not None:
            secret = hmac.digest(context.secret, secret, "sha256")
        engine.connect(context.rank, [endpoint for _, _, endpoint in unpacked], secret)
    except BaseException as error:
        engine.abort(f"rank {context.rank} could not start: {error}")
        engine.shutdown()
        raise
    return engine


def _check_refusals(endpoints: list[bytes]) -> None:
    refused = [
        f"rank {rank} cannot listen: {endpoint[len(_REFUSAL) :].decode(errors='replace')}"
        for rank, endpoint in enumerate(endpoints)
        if endpoint.startswith(_REFUSAL)
    ]
    if refused:
        raise PeerLostError("; ".join(refused))


def _pack(version: str, secret: bytes, endpoint: bytes) -> bytes:
    text = version.encode()
    return _HEADER.pack(len(text), len(secret)) + text + secret + endpoint


def _unpack(message: bytes) -> tuple[str, bytes, bytes]:
    version_length, secret_length = _HEADER.unpack_from(message)
    secret_at = _HEADER.size + version_length
    endpoint_at = secret_at + secret_length
    return message[_HEADER.size : secret_at].decode(), message[secret_at:endpoint_at], message[endpoint_at:]


def _check_versions(versions: list[str]) -> None:
    if len(set(versions)) > 1:
        found = ", ".join(f"rank {rank}: {version}" for rank, version in enumerate(versions))
        raise ValueError(
            f"different versions of sparkvod were found ({found}), one was expected; install the same everywhere"
        )


def shutdown() -> None:
    """Leaves the world; pending operations of all ranks end with ``ShutDownError``. ``init`` may follow."""
    _end(None, "it called shutdown()")


def _end_of_function(error: BaseException | None) -> None:
    _end(error, "its function returned")


def _end(error: BaseException | None, why: str) -> None:
    global _watch, _world
    with _lock:
        world, _world = _world, None
        watch, _watch = _watch, None
        if watch is not None:
            watch.stop()
        if world is None or world.engine is None:
            return
        set_current(None)
        launch_context.remove_exit_hook(_end_of_function)
        if world.metrics is not None:
            world.metrics.close()
        if world.autotuner is not None:
            world.autotuner.stop()
        if error is not None:
            _abort(world, f"raised {type(error).__name__}: {error}")
        world.engine.shutdown(why)
        if world.autotuner is not None:
            world.autotuner.join()


def _abort(world: World, words: str) -> None:
    # The engine's own words must be short, and may not be what UTF-8 has no bytes for.
    text = words if len(words) <= _WORDS else f"{words[:_WORDS]}..."
    if world.engine is not None:
        world.engine.abort(f"rank {world.rank} {text.encode(errors='replace').decode()}")


def _end_of_script(words: str) -> None:
    world = _world
    if world is not None:
        _abort(world, words)


def _end_of_process() -> None:
    world, words = _world, _watch.end_of_process() if _watch is not None else ""
    if world is not None and words:
        _abort(world, words)
    _end(None, "its script ended")


def _after_fork_in_child() -> None:
    # The child has neither the engine's thread nor a right to its connections. Its ranks stay readable (data loader
    # workers shard by them); the engine is never destroyed there, because that would say good-bye for the parent.
    global _lock
    _lock = threading.RLock()
    if _world is not None and _world.engine is not None:
        _parents_engines.append(_world.engine)
        if _world.metrics is not None:
            _world.metrics.forget()
        _world.autotuner = None
        _world.engine = None


_parents_engines: list[Engine] = []
os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_end_of_process)


def world() -> World:
    """Returns the current world.

    Raises:
        NotInitializedError: there is none.
    """
    if _world is None:
        raise NotInitializedError("no world was found, init() was expected to have been called; call it first")
    return _world


def generation() -> int:
    """Returns the number of the current world within this process, 0 when there is none."""
    return 0 if _world is None else _world.generation


def engine() -> Engine:
    """Returns the current world's engine.

    Raises:
        NotInitializedError: there is none, or this process was forked from a rank.
    """
    found = world().engine
    if found is None:
        raise NotInitializedError(
            "a process forked from a rank tried to communicate, only the rank itself may; do it in the rank"
        )
    return found


def running_engine() -> Engine | None:
    """Returns the current world's engine, None when there is none."""
    return None if _world is None else _world.engine


def is_initialized() -> bool:
    """Returns whether ``init`` was called, and ``shutdown`` was not after it."""
    return _world is not None


def rank() -> int:
    """Returns this process's rank, 0 to ``size() - 1``; ``NotInitializedError``, a ``ValueError``, before ``init``."""
    return world().rank


def size() -> int:
    """Returns the number of ranks."""
    return world().size


def local_rank() -> int:
    """Returns this process's rank among those of its host."""
    return world().local_rank


def local_size() -> int:
    """Returns the number of ranks on this host."""
    return world().local_size


def cross_rank() -> int:
    """Returns this process's rank among those with its local rank: the number of its host."""
    return world().cross_rank


def cross_size() -> int:
    """Returns the number of ranks with this process's local rank."""
    return world().cross_size


def is_homogeneous() -> bool:
    """Returns whether all hosts have equally many ranks."""
    return world().is_homogeneous


def stats() -> dict[str, Any]:
    """Returns what the engine has counted since ``init``.

    Returns:
        ``collectives``: calls, tensors and bytes by ``<collective>/<transport>/<algorithm>``, for example
        ``allreduce/shm/in-place``; ``histograms``: by the same keys the ``seconds`` that the calls took in all, and the
        numbers of calls ``by_microseconds`` and ``by_bytes``: item k counts those above 2**(k-1) and up to 2**k, the
        last also all above; ``latencies``: by collective the ``count``, ``seconds`` and ``by_microseconds`` from
        submission to end; ``in_flight``: collectives that are not done; ``cycles``: negotiations; ``cache_hits`` and
        ``cache_misses``: requests that were one bit, and that travelled in full; ``sleeps``: of threads that drive;
        ``idle_wakes``: of the background thread; ``kernels``: the instruction set that sums; ``tunables``: by knob what
        it is now, on all ranks, of those that may change while the engine runs.

    Raises:
        NotInitializedError: there is no world.
    """
    return engine().stats()


def mpi_threads_supported() -> bool:
    """Returns False: MPI is not used. ``NotInitializedError`` before ``init``."""
    world()
    return False


def mpi_enabled() -> bool:
    """Returns False: MPI is not used."""
    return False


def gloo_enabled() -> bool:
    """Returns False: Gloo is not used."""
    return False


def mpi_built() -> bool:
    """Returns False: this engine was built without MPI."""
    return False


def gloo_built() -> bool:
    """Returns False: this engine was built without Gloo."""
    return False


def nccl_built() -> int:
    """Returns 0: this engine was built without NCCL."""
    return 0


def ddl_built() -> bool:
    """Returns False: this engine was built without DDL."""
    return False


def ccl_built() -> bool:
    """Returns False: this engine was built without oneCCL."""
    return False


def cuda_built() -> bool:
    """Returns False: tensors on a GPU go through host memory."""
    return False


def rocm_built() -> bool:
    """Returns False: tensors on a GPU go through host memory."""
    return False
