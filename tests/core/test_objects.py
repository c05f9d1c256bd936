"""Objects over the engine: one that cannot be pickled fails on all ranks at once."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import sparkvod


class Stubborn:
    def __reduce__(self) -> Any:
        raise RuntimeError("not me \ud800")


def _send(root: int) -> tuple[float, list[str]]:
    from sparkvod.core import basics, objects

    basics.init()
    words = []
    begun = time.monotonic()
    for bad in (threading.Lock(), Stubborn()):
        mine = bad if basics.rank() == root else {"fine": 1}
        for send in (
            lambda mine=mine: objects.broadcast_object(mine, root),
            lambda mine=mine: objects.allgather_object(mine),
        ):
            with pytest.raises(ValueError, match="could not be pickled") as caught:
                send()
            assert (caught.value.__cause__ is not None) == (basics.rank() == root)
            words.append(str(caught.value))
    seconds = time.monotonic() - begun
    # The world goes on, with the same names.
    assert objects.broadcast_object({"a": basics.rank()}, root) == {"a": root}
    assert objects.allgather_object(b"") == [b""] * basics.size()
    return seconds, words


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("size", "root"), [(1, 0), (3, 1)])
def test_what_cannot_be_pickled_fails_on_all_ranks(size: int, root: int) -> None:
    found = sparkvod.run_local(_send, (root,), np=size, verbose=0, timeout=50)
    assert all(words == found[0][1] for _, words in found)
    assert all(seconds < 2 for seconds, _ in found)
    assert f"the object of rank {root}, a _thread.lock, could not be pickled (TypeError: " in found[0][1][0]
    assert "RuntimeError: not me" in found[0][1][2]
