"""Two hosts on one kernel: network namespaces joined by a cable of their own. They need root and iproute2.

What is made is named after this process, and goes with :func:`hosts`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator

import pytest

HOSTS = ("north", "south")
ADDRESSES = {4: ("10.213.7.1", "10.213.7.2"), 6: ("fd00:213:7::1", "fd00:213:7::2")}


def ip(*arguments: str) -> str:
    """Runs the command; returns what it says."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20).stdout


class Hosts:
    """Two network namespaces and the cable between them."""

    def __init__(self, family: int) -> None:
        self.addresses = ADDRESSES[family]
        self.names = [f"sv{os.getpid()}-{host}" for host in HOSTS]
        self.interfaces = [f"sv{os.getpid() % 10**7}n", f"sv{os.getpid() % 10**7}s"]
        self._family = family

    def __str__(self) -> str:
        return f"IPv{self._family}"

    def make(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.interfaces[0], "type", "veth", "peer", "name", self.interfaces[1])
        for name, interface, address in zip(self.names, self.interfaces, self.addresses, strict=True):
            ip("link", "set", interface, "netns", name)
            if self._family == 6:
                ip("-n", name, "address", "add", f"{address}/64", "dev", interface, "nodad")
            else:
                ip("-n", name, "address", "add", f"{address}/24", "dev", interface)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", interface, "up")

    def cut(self) -> None:
        """Pulls the cable."""
        ip("-n", self.names[1], "link", "set", self.interfaces[1], "down")

    def kill(self, host: int) -> None:
        """Kills all that runs on a host. Nothing does that was not started there by a test."""
        for pid in ip("netns", "pids", self.names[host]).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def prefix(self, host: int) -> tuple[str, ...]:
        """Returns what runs the command after it on a host, with that host's name for itself."""
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', HOSTS[host])
        return (*named, "ip", "netns", "exec", self.names[host])

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)
        subprocess.run(["ip", "link", "delete", self.interfaces[0]], capture_output=True, timeout=20)


@contextlib.contextmanager
def hosts(family: int) -> Iterator[Hosts]:
    """Makes the two hosts, and removes them; skips the test where that is not possible."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and the command ip (Debian: iproute2)")
    made = Hosts(family)
    try:
        try:
            made.make()
        except subprocess.CalledProcessError as e:
            pytest.skip(f"no network namespaces can be made here: {e.stderr.strip()}")
        yield made
    finally:
        made.remove()
    left = set(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else set()
    assert not left & set(made.names)
