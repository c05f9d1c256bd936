"""What befalls one rank of a world of scripts: how soon the others know, over shared memory and over TCP.

Prints its rows of the table of faults.
"""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

import sparkvod
from sparkvod.core import basics
from sparkvod.core.handles import Pending
from sparkvod.errors import MismatchError
from tests.faults import world_script
from tests.faults.world_script import FAULTY
from tests.launch.worlds import scripts

pytest.importorskip("sparkvod._native", reason="the engine is not built")
pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_leaks")]
RANKS = 3
KNOB = 1.5  # SPARKVOD_COLLECTIVE_TIMEOUT where a rank stands still, seconds
NAMES = {
    "raise": "a script raises",
    "exit": "a script leaves by os._exit",
    "kill": "a script is killed (SIGKILL)",
    "stop": f"a script is stopped (time-out {KNOB:g} s)",
    "close": "a script's sockets are closed",
    "garbage": "a script sends garbage",
}
Table = list[tuple[str, str, str, str]]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("how", NAMES)
def test_the_others_know_within_a_second(how: str, transport: str, tmp_path: Path, fault_table: Table) -> None:
    timeout = f"{KNOB if how == 'stop' else 30:g}"
    knobs = {"SPARKVOD_TRANSPORT": transport, "SPARKVOD_COLLECTIVE_TIMEOUT": timeout}
    with scripts([world_script.__file__, str(tmp_path), how], RANKS, **knobs) as ranks:
        for rank, script in enumerate(ranks):
            if rank != FAULTY:
                said = script.communicate(timeout=40)[1]
                assert script.returncode == 0, said
        if how == "stop":
            ranks[FAULTY].send_signal(signal.SIGKILL)
        ranks[FAULTY].communicate(timeout=10)
    assert ranks[FAULTY].returncode == {"raise": 1, "exit": 3, "kill": -9, "stop": -9}.get(how, 0)
    at = float((tmp_path / "fault").read_text())
    heard = [json.loads((tmp_path / f"heard-{rank}").read_text()) for rank in range(RANKS) if rank != FAULTY]
    times = [note["time"] - at for note in heard]
    told = " ".join(f"{each:.3f}" for each in times)
    fault_table.append((f"{NAMES[how]}, {transport}", told, "-", heard[0]["message"]))
    assert max(times) < (1 + 2 * KNOB if how == "stop" else 1), heard
    for note in heard:
        # Both sides find a closed socket at the same time. Over shared memory each can tell the third of the other.
        named = r"rank \d on" if (how, transport) == ("close", "shm") else f"rank {FAULTY}"
        assert re.search(named, note["message"]), note
        assert note["kind"] == ("CollectiveTimeoutError" if how == "stop" else "PeerLostError"), note


def disagree(transport: str) -> list[float]:
    """One rank submits another shape, dtype or operation; returns how long each disagreement took."""
    basics.init()
    engine, odd = basics.engine(), basics.rank() == FAULTY
    memory = engine.allocate(800)
    took = []
    for asked in ((9, 8, 1), (10, 9, 1), (10, 8, 0)):
        count, dtype, op = asked if odd else (10, 8, 1)
        begun = time.monotonic()
        handle = engine.allreduce("odd", memory.address, memory.address, count, dtype, op)
        with pytest.raises(MismatchError, match=f"rank {FAULTY} sent"):
            Pending(engine, handle, None, memory).wait()
        took.append(time.monotonic() - begun)
        assert world_script.allreduce("step") == RANKS  # and nothing is poisoned
    assert all(transport in way for way in basics.stats()["collectives"])
    return took


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_mismatch_reaches_all_and_poisons_nothing(transport: str, fault_table: Table) -> None:
    env = {"SPARKVOD_TRANSPORT": transport, "SPARKVOD_COLLECTIVE_TIMEOUT": "30"}
    by_rank = sparkvod.run_local(disagree, (transport,), np=RANKS, env=env, verbose=0, timeout=40)
    slowest = [max(took) for took in by_rank]
    assert max(slowest) < 1
    told = " ".join(f"{each:.3f}" for each in slowest)
    fault_table.append((f"ranks disagree, {transport}", told, "-", "MismatchError on all; the world goes on"))
