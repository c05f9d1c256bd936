"""What to say when no descriptor is left, which who waits and tries again would never get."""

from __future__ import annotations

import errno
import resource

from sparkvod.errors import HorovodInternalError


def complaint(error: OSError, what: str) -> HorovodInternalError | None:
    """Returns the error to raise when ``error`` says that the process, or the host, is out of descriptors; else None.

    Args:
        error: what the operating system said.
        what: what was tried: "rank 1 cannot connect to the rendezvous".
    """
    if error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return HorovodInternalError(
            f"{what}: {error.strerror}; this process may have {limit} descriptors and has them all in use: raise the "
            "limit (ulimit -n)"
        )
    if error.errno == errno.ENFILE:
        return HorovodInternalError(f"{what}: {error.strerror}; raise fs.file-max (sysctl) on this host")
    return None
