"""The tuner in real worlds: it ends frozen, on all ranks alike, and the results are right meanwhile."""

from __future__ import annotations

import csv
import ctypes
import time
from pathlib import Path
from typing import Any

import pytest

import sparkvod
from sparkvod import config, errors
from sparkvod.core import autotune, basics
from sparkvod.errors import MismatchError

FLOAT32, SUM = 8, 1
COUNTS = (3, 500, 2000, 40000)
MOST_STEPS = 4000
ON = {
    "SPARKVOD_AUTOTUNE": "1",
    "SPARKVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
    "SPARKVOD_AUTOTUNE_STEPS_PER_SAMPLE": "1",
    "SPARKVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "7",
}


def step(rank: int, size: int, arrays: list[Any]) -> None:
    """What a training's step does, without a front end: some tensors, asynchronously."""
    engine = basics.engine()
    handles = []
    for count, array in zip(COUNTS, arrays, strict=True):
        array[:] = [float(rank + 1)] * count
        address = ctypes.addressof(array)
        handles.append(engine.allreduce(f"grad{count}", address, address, count, FLOAT32, SUM))
    for handle, array in zip(handles, arrays, strict=True):
        engine.wait(handle)
        engine.release(handle)
        assert array[0] == array[-1] == size * (size + 1) / 2


def train(steps: int | None) -> dict[str, Any]:
    """Trains for some steps, or, for None, until rank 0 says that the tuner has ended."""
    basics.init()
    rank, size = basics.rank(), basics.size()
    arrays = [(ctypes.c_float * count)() for count in COUNTS]
    tuner = basics.world().autotuner
    assert (tuner is not None) == (rank == 0)
    done = 0
    ended = (ctypes.c_float * 1)()
    while done < (MOST_STEPS if steps is None else steps):
        step(rank, size, arrays)
        done += 1
        if steps is None:
            ended[0] = float(tuner is not None and not tuner._thread.is_alive())
            engine, address = basics.engine(), ctypes.addressof(ended)
            handle = engine.allreduce("ended", address, address, 1, FLOAT32, SUM)
            engine.wait(handle)
            engine.release(handle)
            if ended[0] > 0:
                break
    found = {"tunables": sparkvod.stats()["tunables"], "steps": done, "limits": basics.engine().tunable_limits()}
    basics.shutdown()
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_it_ends_frozen_with_the_same_values_everywhere(transport: str, tmp_path: Path, no_leaks: None) -> None:
    path = tmp_path / "tuned.csv"
    env = {**ON, "SPARKVOD_TRANSPORT": transport, "SPARKVOD_AUTOTUNE_LOG": str(path)}
    env["SPARKVOD_FUSION_THRESHOLD"] = "1000000"  # what somebody has set is theirs
    found = sparkvod.run_local(train, (None,), np=2, env=env, verbose=0, timeout=100)
    assert found[0]["tunables"] == found[1]["tunables"]
    assert found[0]["steps"] == found[1]["steps"] < MOST_STEPS
    rows = list(csv.DictReader(path.open()))
    assert [row["sample"] for row in rows] == [*map(str, range(1, len(rows))), "frozen"]
    assert 5 <= len(rows) - 1 <= 7
    assert all(float(row["bytes_per_second"]) > 0 for row in rows)
    frozen = {name: rows[-1][name] for name in found[0]["tunables"]}
    assert frozen == {name: str(value) for name, value in found[0]["tunables"].items()}
    assert any({name: row[name] for name in frozen} == frozen for row in rows[:-1])
    assert {row["fusion_threshold"] for row in rows} == {"1000000"}
    assert rows[0]["linger_us"] == "300"
    moved = {name for name in frozen if len({row[name] for row in rows}) > 1}
    if transport == "tcp":
        assert moved == {"linger_us", "link_gbits", "tcp_streams"}
        assert rows[0]["tcp_streams"] == "1"
        assert found[0]["limits"]["tcp_streams"] == (1, autotune.STREAMS)
    else:
        assert moved == {"linger_us", "one_shot_bytes"}


@pytest.mark.timeout(60)
def test_a_world_that_ends_before_it_is_done(no_leaks: None) -> None:
    found = sparkvod.run_local(train, (3,), np=2, env=ON, verbose=0, timeout=50)
    assert [each["steps"] for each in found] == [3, 3]


def tune_by_hand() -> list[Any]:
    basics.init()
    engine = basics.engine()
    before = engine.tunables()
    handle = engine.tune({"linger_us": basics.rank() + 1, "link_gbits": 2.5})
    with pytest.raises(MismatchError, match="rank 1 sent tune to .*linger_us=2, .*link_mbits=2500"):
        engine.wait(handle)
    engine.release(handle)
    assert engine.tunables() == before
    with pytest.raises(ValueError, match="can be tuned: cycle_time; of fusion_threshold, .*link_gbits.* some were exp"):
        engine.tune({"cycle_time": 1})
    with pytest.raises(ValueError, match=r"link_gbits=nan was found, 10\^9 bits per second"):
        engine.tune({"link_gbits": float("nan")})
    with pytest.raises(ValueError, match="linger_us=-5 was found, a value from 0 to 1000000 was expected"):
        engine.tune({"linger_us": -5})
    for alone in (False, True):
        if basics.rank() == 0 or not alone:
            handle = engine.tune({"linger_us": 7 + alone, "link_gbits": 2.5}, alone=alone)
            engine.wait(handle)
            engine.release(handle)
    handle = engine.barrier("all")
    engine.wait(handle)
    engine.release(handle)
    assert engine.tunables() == {**before, "linger_us": 8, "link_gbits": 2.5}
    assert engine.next_sample(0.01) is None
    basics.shutdown()
    return sorted(before)


@pytest.mark.timeout(60)
def test_tuning_by_hand(no_leaks: None) -> None:
    found = sparkvod.run_local(tune_by_hand, np=2, verbose=0, timeout=50)
    assert found[0] == ["fusion_threshold", "linger_us", "link_gbits", "one_shot_bytes", "tcp_streams"]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RANK", "WORLD_SIZE", "SPARKVOD_RANK", "SPARKVOD_SIZE", *ON):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("autotune", "perhaps"),
        ("autotune_warmup_samples", "-1"),
        ("autotune_steps_per_sample", "0"),
        ("autotune_bayes_opt_max_samples", "0"),
        ("autotune_gaussian_process_noise", "1.5"),
    ],
)
def test_a_knob_that_cannot_be_is_refused_at_init(alone: pytest.MonkeyPatch, knob: str, value: str) -> None:
    variable = config.KNOBS[knob].variable
    alone.setenv(variable, value)
    with pytest.raises(ValueError, match=f"^{variable}='{value}' was found, .* was expected"):
        basics.init()
    assert not basics.is_initialized()


def test_without_numpy_it_says_what_to_install(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("SPARKVOD_AUTOTUNE", "1")
    alone.setattr(errors, "_is_installed", lambda module: module != "numpy")
    with pytest.raises(ImportError, match=r"numpy was not found, which SPARKVOD_AUTOTUNE needs; .*\[autotune\]"):
        basics.init()
    assert not basics.is_initialized()


@pytest.mark.timeout(30)
def test_a_log_that_cannot_be_written_costs_a_warning(
    alone: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, no_leaks: None
) -> None:
    alone.setenv("SPARKVOD_AUTOTUNE", "1")
    alone.setenv("SPARKVOD_AUTOTUNE_LOG", "/dev/null/tuned.csv")
    basics.init()
    tuner = basics.world().autotuner
    deadline = time.monotonic() + 20
    while tuner is not None and tuner._thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)  # a world of one has nothing to tune
    assert tuner is not None
    assert not tuner._thread.is_alive()
    basics.shutdown()
    assert "SPARKVOD_AUTOTUNE_LOG" in caplog.text


@pytest.mark.timeout(30)
def test_a_log_that_is_full_costs_a_warning(
    alone: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, no_leaks: None
) -> None:
    alone.setenv("SPARKVOD_AUTOTUNE", "1")
    alone.setattr(autotune, "_DIMENSIONS", ())
    basics.init()
    tuner = basics.world().autotuner
    assert tuner is not None
    tuner._thread.join(20)
    alone.setenv("SPARKVOD_AUTOTUNE_LOG", "/dev/full")
    tuner._settings = autotune.settings()
    tuner._open_log()
    for _ in range(2):
        tuner._write("sample", [1, 2], 3)
        assert tuner._log is None
    basics.shutdown()
    assert caplog.text.count("No space left on device") == 1


def test_off_there_is_no_tuner(alone: pytest.MonkeyPatch) -> None:
    basics.init()
    assert basics.world().autotuner is None
    assert basics.stats()["tunables"]["linger_us"] == 300
    basics.shutdown()
    assert autotune.overrides(autotune.settings()) == {}
    assert not autotune.settings().on


@pytest.mark.parametrize("dimension", autotune._DIMENSIONS, ids=lambda dimension: dimension.name)
def test_places_and_values(dimension: autotune._Dimension) -> None:
    assert dimension.value(0) == dimension.least
    assert dimension.value(1) == dimension.most
    for place in (0.0, 0.3, 0.6, 1.0):
        assert dimension.place(dimension.value(place)) == pytest.approx(place, abs=0.1)
    assert dimension.place(0) == 0
    assert dimension.place(1e12) == 1
