from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkvod.errors import CollectiveTimeoutError, LaunchError
from sparkvod.launch._user_secret import user_secret
from sparkvod.launch.environment import from_environment
from sparkvod.launch.rendezvous import Rendezvous
from tests.launch.worlds import free_port, together

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this user's secret is kept during a test."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


def torchrun(rank: int, size: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def own(rank: int, size: int, port: int) -> dict[str, str]:
    address = f"127.0.0.1:{port}"
    return {"SPARKVOD_RANK": str(rank), "SPARKVOD_SIZE": str(size), "SPARKVOD_RENDEZVOUS": address}


@pytest.mark.parametrize(
    "env", [{}, {"MASTER_ADDR": "somewhere", "MASTER_PORT": "1"}, {"SPARKVOD_RANK": "", "RANK": ""}]
)
def test_nothing_set_is_a_world_of_one(env: dict[str, str]) -> None:
    world = from_environment(env)
    assert (world.rank, world.size, world.secret) == (0, 1, None)
    assert world.allgather(b"x") == [b"x"]


@pytest.mark.parametrize(
    "env",
    [{"SPARKVOD_RANK": "0", "SPARKVOD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}, torchrun(0, 1, 1), own(0, 1, 1)],
)
def test_a_world_of_one_needs_no_address(env: dict[str, str]) -> None:
    world = from_environment(env)
    assert (world.rank, world.size, world.allgather(b"x")) == (0, 1, [b"x"])


@pytest.mark.parametrize("describe", [own, torchrun])
@pytest.mark.parametrize("with_secret", [False, True])
def test_ranks_meet(describe: object, with_secret: bool, tmp_path: Path, home: Path) -> None:
    assert callable(describe)
    extra = {}
    if with_secret:
        path = tmp_path / "secret"
        path.write_bytes(b"0123456789abcdef0123\n")
        path.chmod(0o600)
        extra = {"SPARKVOD_SECRET_FILE": str(path)}
    port = free_port()
    worlds = [from_environment({**describe(rank, 3, port), **extra}) for rank in range(3)]
    assert [world.rank for world in worlds] == [0, 1, 2]
    secret = b"0123456789abcdef0123" if with_secret else (home / ".sparkvod/secret").read_bytes()
    assert [world.secret for world in worlds] == [secret] * 3
    for _ in range(2):
        gathered = together([lambda w=w: w.allgather(b"%d" % w.rank) for w in worlds])
        assert gathered == [[b"0", b"1", b"2"]] * 3


@pytest.mark.parametrize("describe", [own, torchrun])
def test_another_user_of_the_host_cannot_claim_a_rank(describe: Callable[[int, int, int], dict[str, str]]) -> None:
    """Without a secret file too: he knows the address and all variables, not this user's secret."""
    port = free_port()
    worlds = [from_environment(describe(rank, 2, port)) for rank in range(2)]
    claims = [
        Rendezvous(1, 2, ("127.0.0.1", port), key, 0.6, "SPARKVOD_RENDEZVOUS")
        for key in (f"127.0.0.1:{port}".encode(), b"")
    ]
    claimed = [lambda c=c: c(b"claimed") for c in claims]

    def late() -> list[bytes]:
        time.sleep(0.3)
        return worlds[1].allgather(b"1")

    outcomes = together([lambda: worlds[0].allgather(b"0"), late, *claimed])
    assert outcomes[:2] == [[b"0", b"1"]] * 2
    assert all(isinstance(outcome, CollectiveTimeoutError) for outcome in outcomes[2:])


def test_torchrun_on_one_host_needs_no_loopback_name(home: Path) -> None:
    env = {**torchrun(0, 2, 1), "MASTER_ADDR": "10.1.2.3", "LOCAL_WORLD_SIZE": "2"}
    assert from_environment(env).secret == (home / ".sparkvod/secret").read_bytes()
    assert from_environment({**env, "LOCAL_WORLD_SIZE": "1"}).secret is None


def test_the_users_secret_is_made_once_and_private(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = together([lambda: user_secret(0)] * 8)
    path = home / ".sparkvod/secret"
    assert found == [path.read_bytes()] * 8
    assert len(found[0]) == 32
    assert [stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent)] == [0o600, 0o700]
    assert list(path.parent.iterdir()) == [path]
    # One that others can read, or that is short, is not used: the temporary directory's is.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path.chmod(0o644)
    elsewhere = user_secret(0)
    assert elsewhere != found[0]
    path.write_bytes(b"short")
    path.chmod(0o600)
    assert user_secret(0) == elsewhere
    (tmp_path / f"sparkvod-{os.geteuid()}").chmod(0o755)
    with pytest.raises(
        LaunchError, match=r"(?s)'secret' in it has 5 bytes.*not this user's alone.*SPARKVOD_SECRET_FILE"
    ):
        user_secret(0)


def test_sparkvods_own_variables_come_first() -> None:
    assert from_environment({**own(1, 2, 5), **torchrun(0, 7, 6)}).size == 2


@pytest.mark.parametrize(
    ("env", "missing"),
    [
        ({"RANK": "0"}, "WORLD_SIZE too was expected"),
        ({"WORLD_SIZE": "2"}, "RANK too was expected"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT too were expected"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}, "MASTER_PORT too was expected"),
        ({"SPARKVOD_RANK": "0"}, "SPARKVOD_SIZE, SPARKVOD_RENDEZVOUS too were expected"),
        ({"SPARKVOD_RANK": "0", "SPARKVOD_SIZE": "2"}, "SPARKVOD_RENDEZVOUS too was expected"),
        ({"SPARKVOD_RENDEZVOUS": "x:1"}, "SPARKVOD_RANK, SPARKVOD_SIZE too were expected"),
    ],
)
def test_half_a_world_is_an_error(env: dict[str, str], missing: str) -> None:
    with pytest.raises(LaunchError, match=f"a part of a world only.*{missing}"):
        from_environment(env)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"RANK": "zero", "WORLD_SIZE": "1"}, "RANK='zero' was found, a whole number"),
        ({"SPARKVOD_RANK": "0", "SPARKVOD_SIZE": "two"}, "SPARKVOD_SIZE='two' was found"),
        (own(0, 2, 1) | {"SPARKVOD_RENDEZVOUS": "nowhere"}, "SPARKVOD_RENDEZVOUS='nowhere' was found, host:port"),
        (own(0, 2, 1) | {"SPARKVOD_RENDEZVOUS": "x:99999"}, "host:port"),
        (own(2, 2, 1), "rank 2 of a world of 2 was found"),
        (torchrun(-1, 2, 1), "rank -1 of a world of 2 was found"),
        (torchrun(0, 2, 99999), "MASTER_PORT=99999 was found, a port from 1 to 65535"),
        (torchrun(0, 2, 0), "MASTER_PORT=0 was found, a port from 1 to 65535"),
        (torchrun(0, 1 << 40, 1), "WORLD_SIZE='1099511627776' was found, a value of at most"),
        (own(0, 1 << 40, 1), "SPARKVOD_SIZE='1099511627776' was found, a value of at most"),
    ],
)
def test_values_that_fit_no_world(env: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_environment(env)


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (b"0123456789abcdef", 0o644, "mode 644.*chmod 600"),
        (b"short", 0o600, "holds 5 bytes, 16 to 4096"),
        (None, 0o600, "cannot be read"),
    ],
)
def test_a_secret_that_is_none(content: bytes | None, mode: int, said: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(LaunchError, match=said):
        from_environment({**own(0, 2, 1), "SPARKVOD_SECRET_FILE": str(path)})


def test_meeting_without_a_secret_on_a_network_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    from_environment({**torchrun(0, 2, 1), "MASTER_ADDR": "10.1.2.3"})
    assert "the ranks meet at 10.1.2.3:1 without a secret" in caplog.text
    caplog.clear()
    from_environment({**torchrun(0, 2, 1), "MASTER_ADDR": "10.1.2.3", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert "the ranks meet at 10.1.2.3:1 without a secret" in caplog.text
    caplog.clear()
    from_environment({**torchrun(1, 2, 1), "MASTER_ADDR": "10.1.2.3"})
    from_environment(torchrun(0, 2, 1))
    assert caplog.text == ""


@pytest.mark.parametrize("describe", [own, torchrun])
def test_sizes_that_differ_are_named_on_both_sides(describe: Callable[[int, int, int], dict[str, str]]) -> None:
    port = free_port()
    worlds = [from_environment({**describe(rank, 2 + rank, port), "SPARKVOD_START_TIMEOUT": "20"}) for rank in range(2)]
    begun = time.monotonic()
    errors = together([lambda w=w: _error_of(w.allgather) for w in worlds])
    assert time.monotonic() - begun < 5
    assert all("rank 1 says that the world has 3 ranks, rank 0 says 2" in error for error in errors)


def test_sizes_that_differ_are_named_at_torchruns_store() -> None:
    distributed = pytest.importorskip("torch.distributed", reason="torchrun's store is torch's")
    port = free_port()
    store = distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "SPARKVOD_START_TIMEOUT": "20"}
    worlds = [from_environment({**torchrun(rank, 2 + rank, port), **agent}) for rank in range(2)]
    errors = together([lambda w=w: _error_of(w.allgather) for w in worlds])
    assert "rank 1 says that the world has 3 ranks, rank 0 says 2" in errors[0]
    assert "rank 0 says that the world has 2 ranks, rank 1 says 3" in errors[1]
    late = {"TORCHELASTIC_RESTART_COUNT": "7", "SPARKVOD_START_TIMEOUT": "0.5"}
    alone = from_environment({**torchrun(0, 2, port), **agent, **late})
    with pytest.raises(CollectiveTimeoutError, match=r"rank 0 waited for rank 1 at MASTER_ADDR=127\.0\.0\.1"):
        alone.allgather(b"x")
    del store


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("host", ["no-such-host.invalid", "x" * 300])
def test_a_host_that_cannot_be_resolved_is_named(rank: int, host: str) -> None:
    short = {"SPARKVOD_START_TIMEOUT": "0.3"}
    by_torchrun = from_environment({**torchrun(rank, 2, 1), "MASTER_ADDR": host, **short})
    assert f"rank {rank} cannot resolve the host '{host}' of MASTER_ADDR" in _error_of(by_torchrun.allgather)
    by_hand = from_environment({**own(rank, 2, 1), "SPARKVOD_RENDEZVOUS": f"{host}:1", **short})
    assert f"cannot resolve the host '{host}' of SPARKVOD_RENDEZVOUS" in _error_of(by_hand.allgather)


def _error_of(allgather: Callable[[bytes], object]) -> str:
    with pytest.raises(LaunchError) as caught:
        allgather(b"x")
    return str(caught.value)
