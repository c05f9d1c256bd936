"""The tuner: rank 0 tries values of a few knobs of the running engine and stays where most bytes a second are carried.

The engine measures: a sample is so many steps of the training, told by the names of its collectives, and the score of
a set of values is the median of a few samples. Rank 0 alone decides, in a thread of its own, and says what comes next
in a collective that the engines of the other ranks take from it, so all ranks change between the same two collectives
and no other rank has a thread or a wait for it.
"""

from __future__ import annotations

import contextlib
import csv
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from sparkvod import config, log
from sparkvod._native import Engine
from sparkvod.errors import HorovodInternalError, require

if TYPE_CHECKING:
    import numpy as np

# Streams that are connected for the tuner where the knob says nothing.
STREAMS = 4
# Samples of a score, of which it is the median; odd.
SAMPLES = 5
# It ends where the next values are expected to bring less than this share of the best score.
LEAST_GAIN = 0.01
_LOOK_SECONDS = 0.5
_JOIN_SECONDS = 10.0
_Value = int | float


@dataclass(frozen=True)
class _Dimension:
    """What a knob may be: from ``least`` to ``most``, evenly in the logarithm of the value and ``offset``."""

    name: str
    least: float
    most: float
    offset: float = 0.0
    whole: bool = True

    def value(self, place: float) -> _Value:
        """Returns the value at a place from 0 to 1."""
        low, high = math.log(self.least + self.offset), math.log(self.most + self.offset)
        value = math.exp(low + place * (high - low)) - self.offset
        value = min(max(value, self.least), self.most)
        return round(value) if self.whole else round(value, 3)

    def place(self, value: float) -> float:
        """Returns the place of a value, that of the nearest end for one that is outside."""
        low, high = math.log(self.least + self.offset), math.log(self.most + self.offset)
        return min(max((math.log(max(value, self.least) + self.offset) - low) / (high - low), 0.0), 1.0)


_DIMENSIONS = (
    _Dimension("fusion_threshold", 16 << 10, 128 << 20),
    _Dimension("linger_us", 0, 2000, offset=20),
    _Dimension("one_shot_bytes", 1 << 10, 128 << 10),
    _Dimension("link_gbits", 0.1, 400.0, whole=False),
    _Dimension("tcp_streams", 1, 64),
)


@dataclass(frozen=True)
class Settings:
    """The knobs of the tuner itself."""

    on: bool
    log: str
    warmup_samples: int
    steps_per_sample: int
    max_samples: int
    noise: float


def settings() -> Settings:
    """Reads the tuner's knobs.

    Raises:
        ValueError: one holds what it cannot take.
        ImportError: it is on, and numpy is not installed.
    """
    found = Settings(
        config.get("autotune"),
        config.get("autotune_log"),
        config.get("autotune_warmup_samples"),
        config.get("autotune_steps_per_sample"),
        config.get("autotune_bayes_opt_max_samples"),
        config.get("autotune_gaussian_process_noise"),
    )
    if found.on:
        require("autotune", "SPARKVOD_AUTOTUNE", "numpy")
    return found


def overrides(found: Settings) -> dict[str, Any]:
    """Returns what the engine must be made with, by knob, so that there is something to tune."""
    return {"tcp_streams": STREAMS} if found.on and not config.is_set("tcp_streams") else {}


class _Stopped(Exception):  # noqa: N818
    """The world ends before the tuner is done."""


class Autotuner:
    """Tunes an engine in a thread, until nothing is to be gained or the world ends. Of rank 0.

    Args:
        engine: the connected engine.
        found: the tuner's knobs.
    """

    def __init__(self, engine: Engine, found: Settings) -> None:
        self._engine, self._settings = engine, found
        limits = engine.tunable_limits()
        self._dimensions = [
            _Dimension(d.name, max(d.least, limits[d.name][0]), min(d.most, limits[d.name][1]), d.offset, d.whole)
            for d in _DIMENSIONS
            if d.name in limits and not config.is_set(d.name)
        ]
        self._stopping = threading.Event()
        self._log: IO[str] | None = None
        self._open_log()
        self._thread = threading.Thread(target=self._run, name="sparkvod-autotune", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends it soon; what was tuned last stays."""
        self._stopping.set()
        self._engine.stop_meter()

    def join(self) -> None:
        """Waits for its end, after :meth:`stop` and the engine's shutdown."""
        self._thread.join(_JOIN_SECONDS)

    def _open_log(self) -> None:
        if not self._settings.log:
            return
        try:
            # Written row by row while the training goes on; the thread closes it.
            self._log = open(self._settings.log, "w", newline="", buffering=1)  # noqa: SIM115
        except OSError as e:  # a log that cannot be written costs a warning, never the job
            log.get("core").warning("SPARKVOD_AUTOTUNE_LOG: %s", e)

    def _run(self) -> None:
        logger = log.get("core")
        try:
            if self._dimensions:
                logger.info("autotune: these are frozen: %s", self._tune())
            else:
                logger.info("autotune: there is nothing to tune here")
        except (_Stopped, HorovodInternalError):
            logger.debug("autotune: the world ended before the tuner")
        except Exception:  # whatever it is, it must not cost the training
            logger.exception("autotune: it failed, and leaves the knobs as they are")
        finally:
            self._engine.stop_meter()
            self._close_log()

    def _tune(self) -> dict[str, _Value]:
        # Not at the top: numpy is needed by who tunes only.
        from sparkvod.core.bayes import Search

        search = Search(len(self._dimensions), self._settings.noise)
        tried: list[dict[str, _Value]] = []
        # The first point is what the knobs are, but for streams that nobody asked for.
        values = self._values_in_use()
        if "tcp_streams" in values:
            values["tcp_streams"] = 1
            self._apply(values)
        self._write("sample", list(self._engine.tunables()), "bytes_per_second")
        self._engine.start_meter(self._settings.steps_per_sample)
        for _ in range(self._settings.warmup_samples):
            self._sample()
        while True:
            score = sorted(self._sample() for _ in range(SAMPLES))[SAMPLES // 2]
            tried.append(values)
            search.tell(self._point(values), score)
            self._write(len(tried), list(self._engine.tunables().values()), round(score))
            if len(tried) == self._settings.max_samples or (search.spread and search.gain() < LEAST_GAIN):
                break
            values = self._values(search.ask())
            self._apply(values)
        best = search.best()
        self._apply(tried[best])
        self._write("frozen", list(self._engine.tunables().values()), round(search.scores[best]))
        return tried[best]

    def _values_in_use(self) -> dict[str, _Value]:
        in_use: Mapping[str, _Value] = self._engine.tunables()
        return {d.name: in_use[d.name] for d in self._dimensions}

    def _point(self, values: Mapping[str, _Value]) -> np.ndarray:
        import numpy as np

        return np.array([d.place(values[d.name]) for d in self._dimensions])

    def _values(self, point: np.ndarray) -> dict[str, _Value]:
        return {d.name: d.value(float(place)) for d, place in zip(self._dimensions, point, strict=True)}

    def _sample(self) -> float:
        """Waits for the next sample and returns its bytes per second."""
        while True:
            sample = self._engine.next_sample(_LOOK_SECONDS)
            if self._stopping.is_set() or not self._engine.running:
                raise _Stopped
            if sample is not None and sample[1] > 0:
                return sample[0] / sample[1]

    def _apply(self, values: Mapping[str, _Value]) -> None:
        """Sets knobs on all ranks; samples of what was before are gone when it returns."""
        handle = self._engine.tune(dict(values), alone=True)
        try:
            self._engine.wait(handle)
        finally:
            self._engine.release(handle)

    def _write(self, first: object, values: list[Any], last: object) -> None:
        if self._log is None:
            return
        try:
            csv.writer(self._log).writerow([first, *values, last])
        except OSError as e:
            log.get("core").warning("SPARKVOD_AUTOTUNE_LOG: %s", e)
            self._close_log()

    def _close_log(self) -> None:
        file, self._log = self._log, None
        if file is not None:
            with contextlib.suppress(OSError):  # a row that could not be written, of which a warning was told
                file.close()
