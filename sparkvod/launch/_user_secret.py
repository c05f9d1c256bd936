"""The secret of this user on this host, for ranks that meet over loopback and were given no secret file.

Every user of a host can connect to its loopback addresses. The file is made once and readable by its owner only, so
that to know it is to be this user.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator

from sparkvod.errors import LaunchError
from sparkvod.launch import descriptors
from sparkvod.launch._file_gather import is_private

_BYTES = 32


def user_secret(rank: int) -> bytes:
    """Returns the 32 bytes in ``~/.sparkvod/secret``, which is made where it is missing.

    Where the home directory cannot be used, a directory of this user's in the host's temporary one serves.

    Args:
        rank: whose secret it is, for messages.

    Raises:
        HorovodInternalError: this process is out of descriptors.
        LaunchError: there is no place that is this user's alone.
    """
    problems = []
    for folder in _folders():
        try:
            return _read_or_make(folder)
        except OSError as e:
            if problem := descriptors.complaint(e, f"rank {rank} cannot read the secret in {folder}"):
                raise problem from e
            problems.append(f"{folder}: {e.strerror or e}")
    raise LaunchError(
        f"the ranks meet over loopback, which needs a secret that other users cannot read, and none can be kept "
        f"({'; '.join(problems)}): put random bytes into a file of mode 600 and name it in SPARKVOD_SECRET_FILE"
    )


def _folders() -> Iterator[str]:
    yield os.path.expanduser("~/.sparkvod")
    yield f"{tempfile.gettempdir()}/sparkvod-{os.geteuid()}"  # to find it takes a descriptor


def _read_or_make(folder: str) -> bytes:
    os.makedirs(folder, 0o700, exist_ok=True)
    if not is_private(folder):
        raise OSError("it is not this user's alone; run chmod 700 on it, or remove it")
    path = os.path.join(folder, "secret")
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    part = f"{path}.{secrets.token_hex(8)}"
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(secrets.token_bytes(_BYTES))
    try:
        with contextlib.suppress(FileExistsError):
            os.link(part, path)  # whole, and only once: ranks start at the same time
    finally:
        os.unlink(part)
    return _read(path)


def _read(path: str) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        info = os.fstat(file.fileno())
        if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
            raise OSError("'secret' in it can be read by others; remove it")
        secret = file.read(_BYTES + 1)
    if len(secret) != _BYTES:
        raise OSError(f"'secret' in it has {len(secret)} bytes, not {_BYTES}; remove it")
    return secret
