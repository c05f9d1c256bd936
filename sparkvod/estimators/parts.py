"""What the user passed, as bytes for the workers and for saving. For all frameworks; no Spark is needed."""

from __future__ import annotations

from typing import Any

import cloudpickle


def dump_part(name: str, part: Any) -> bytes:
    """Returns what the user passed as the Param ``name``, pickled.

    Raises:
        TypeError: it cannot be pickled.
    """
    try:
        return cloudpickle.dumps(part)
    except Exception as error:
        raise TypeError(
            f"{name} cannot be pickled ({type(error).__name__}: {error}), something that can be sent to the workers "
            "was expected; it must not hold a Spark session, a lock, a file or a connection"
        ) from error
