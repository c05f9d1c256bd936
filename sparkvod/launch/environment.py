"""The world that the environment describes, for a script that anybody may have started.

Looked at in this order: sparkvod's own variables (``SPARKVOD_RANK``, ``SPARKVOD_SIZE``, ``SPARKVOD_RENDEZVOUS``, and
``SPARKVOD_SECRET_FILE``), those that torchrun sets (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``), else
this process is alone, a world of one. An environment that says half of it is an error, never a world of one: two
processes that each believe to be alone would train two models.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import stat
import time
from collections.abc import Callable, Mapping

from sparkvod import config, log
from sparkvod.errors import CollectiveTimeoutError, LaunchError
from sparkvod.launch._user_secret import user_secret
from sparkvod.launch.context import WorldContext
from sparkvod.launch.rendezvous import Rendezvous

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def from_environment(env: Mapping[str, str] | None = None) -> WorldContext:
    """Returns the world that the environment describes; nothing is connected before its first all-gather.

    Args:
        env: environment to read, the process's by default.

    Raises:
        LaunchError: the environment names only a part of a world, or a secret file that is not private.
        ValueError: a variable holds no number, or numbers that fit no world.
    """
    env = config.environment() if env is None else env
    return _own(env) or _torchrun(env) or WorldContext(0, 1, lambda data: [data], _secret(env))


def _own(env: Mapping[str, str]) -> WorldContext | None:
    needed = {name: env.get(name, "") for name in ("SPARKVOD_RANK", "SPARKVOD_SIZE")}
    if not any(needed.values()) and not env.get("SPARKVOD_RENDEZVOUS"):
        return None
    size = config.get("size", env)
    if size != 1:
        needed["SPARKVOD_RENDEZVOUS"] = env.get("SPARKVOD_RENDEZVOUS", "")
    _complain_of_half(needed)
    rank, secret = config.get("rank", env), _secret(env)
    if size == 1:
        return WorldContext(rank, size, lambda data: [data], secret)
    address = _address(config.get("rendezvous", env))
    secret = secret or _default_secret(rank, address, _is_loopback(address[0]))
    return WorldContext(rank, size, _rendezvous(rank, size, address, secret, env, "SPARKVOD_RENDEZVOUS"), secret)


def _torchrun(env: Mapping[str, str]) -> WorldContext | None:
    needed = {name: env.get(name, "") for name in ("RANK", "WORLD_SIZE")}
    if not any(needed.values()):
        return None
    _complain_of_half(needed)
    rank, size, secret = _number("RANK", env), _number("WORLD_SIZE", env), _secret(env)
    if size == 1:
        return WorldContext(rank, size, lambda data: [data], secret)
    _complain_of_half({**needed, **{name: env.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")}})
    address = (env["MASTER_ADDR"], _number("MASTER_PORT", env))
    if not 0 < address[1] < 65536:
        raise ValueError(f"MASTER_PORT={address[1]} was found, a port from 1 to 65535 was expected")
    # torchrun may name its only host by a name that others know as well.
    one_host = _is_loopback(address[0]) or env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]
    secret = secret or _default_secret(rank, address, one_host)
    if env.get(_AGENT_STORE) == "True":
        attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
        return WorldContext(rank, size, _agent_store(rank, size, address, attempt, env), secret)
    return WorldContext(rank, size, _rendezvous(rank, size, address, secret, env, "MASTER_ADDR"), secret)


def _default_secret(rank: int, address: tuple[str, int], one_host: bool) -> bytes | None:
    """Returns this user's secret for a world of one host, whose other users can reach the address too."""
    if one_host:
        return user_secret(rank)
    if rank == 0:
        log.get("launch").warning(
            "the ranks meet at %s:%d without a secret: whoever reaches that port can join or disturb the job; give "
            "every rank a copy of one file of random bytes in SPARKVOD_SECRET_FILE",
            *address,
        )
    return None


def _complain_of_half(needed: Mapping[str, str]) -> None:
    missing = [name for name, value in needed.items() if not value]
    if missing:
        found = ", ".join(f"{name}={value}" for name, value in needed.items() if value) or "SPARKVOD_RENDEZVOUS"
        raise LaunchError(
            f"the environment describes a part of a world only (found {found}), {', '.join(missing)} too "
            f"{'was' if len(missing) == 1 else 'were'} expected; set all of them, or none to run alone"
        )


def _number(name: str, env: Mapping[str, str]) -> int:
    try:
        number = int(env[name])
    except ValueError:
        raise ValueError(f"{name}={env[name]!r} was found, a whole number was expected") from None
    if abs(number) > config.MOST_RANKS:
        raise ValueError(f"{name}={env[name]!r} was found, a value of at most {config.MOST_RANKS} was expected")
    return number


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"SPARKVOD_RENDEZVOUS={text!r} was found, host:port of rank 0 was expected")
    return host.strip("[]"), int(port)


def _secret(env: Mapping[str, str]) -> bytes | None:
    path = config.get("secret_file", env)
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(4097).strip()
    except OSError as e:
        raise LaunchError(
            f"SPARKVOD_SECRET_FILE={path} cannot be read ({e.strerror}); give a file that this user can read"
        ) from e
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise LaunchError(
            f"SPARKVOD_SECRET_FILE={path} has mode {stat.S_IMODE(mode):o}, a file that only its owner can read was "
            f"expected; run: chmod 600 {path}"
        )
    if not 16 <= len(secret) <= 4096:
        raise LaunchError(
            f"SPARKVOD_SECRET_FILE={path} holds {len(secret)} bytes, 16 to 4096 random ones were expected"
        )
    return secret


def _rendezvous(
    rank: int, size: int, address: tuple[str, int], secret: bytes | None, env: Mapping[str, str], variable: str
) -> Callable[[bytes], list[bytes]]:
    # Without a secret the key only keeps strangers by accident out: port scanners, ranks of another job. The size is
    # not in it, so that ranks which disagree about it are told so.
    key = secret or f"{address[0]}:{address[1]}".encode()
    return Rendezvous(rank, size, address, key, config.get("start_timeout", env), variable)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _agent_store(
    rank: int, size: int, address: tuple[str, int], attempt: str, env: Mapping[str, str]
) -> Callable[[bytes], list[bytes]]:
    """Gathers through the key-value store that torchrun's agent already serves on ``MASTER_PORT``."""
    generation = 0

    def allgather(data: bytes) -> list[bytes]:
        from datetime import timedelta

        from torch.distributed import TCPStore

        nonlocal generation
        seconds = config.get("start_timeout", env)
        until = time.monotonic() + seconds
        prefix = f"sparkvod/{attempt}/{generation}/"
        generation += 1
        where = "torchrun's store"
        try:
            store = TCPStore(*address, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False)
            store.set(f"{prefix}{rank}", f"{size}:{base64.b64encode(data).decode()}")
            gathered = []
            for other in range(size):
                where = f"rank {other}"
                store.set_timeout(timedelta(seconds=max(until - time.monotonic(), 0.001)))  # one deadline for all
                its_size, _, its_data = store.get(f"{prefix}{other}").partition(b":")
                if int(its_size) != size:
                    raise LaunchError(
                        f"rank {other} says that the world has {int(its_size)} ranks, rank {rank} says {size}; check "
                        "what sets WORLD_SIZE"
                    )
                gathered.append(base64.b64decode(its_data))
            return gathered
        except RuntimeError as error:
            if isinstance(error, LaunchError):
                raise
            raise CollectiveTimeoutError(
                f"rank {rank} waited for {where} at MASTER_ADDR={address[0]}, MASTER_PORT={address[1]} ({error}), all "
                f"{size} ranks were expected within {seconds:g} s; check that each calls init() and that the address "
                "can be reached, or raise SPARKVOD_START_TIMEOUT"
            ) from error

    return allgather
