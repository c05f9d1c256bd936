"""One logger for the whole package, ``sparkvod``; ranks add their number by :func:`rank_logger`."""

from __future__ import annotations

import logging

from sparkvod import config

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def get(name: str = "") -> logging.Logger:
    """Returns the logger ``sparkvod`` or a child of it.

    The level is the knob ``log_level``. A handler is added only when the application has configured none, so that
    a notebook shows warnings and a program keeps its own logging.

    Args:
        name: dotted suffix, for example ``"launch.spark"``.
    """
    root = logging.getLogger("sparkvod")
    if root.level == logging.NOTSET:
        root.setLevel(config.get("log_level").upper())
    if not root.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        root.addHandler(handler)
    return root.getChild(name) if name else root
