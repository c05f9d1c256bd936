"""sparkvod's own errors, which pass through TensorFlow's runtime as texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from sparkvod import errors

# How native/bindings/tensorflow/kernel.cc writes them.
_OWN = re.compile(r"sparkvod (\w+): (.*?) \[sparkvod\]", re.DOTALL)


def translated(error: BaseException) -> BaseException:
    """Returns the exception of sparkvod that an exception of TensorFlow carries, else the exception itself."""
    found = _OWN.search(str(error))
    if found is None:
        return error
    name, message = found.groups()
    own = ValueError if name == "ValueError" else getattr(errors, name, errors.HorovodInternalError)
    return own(message)


@contextmanager
def own_errors() -> Iterator[None]:
    """Raises what a collective failed with as the same classes that other front ends raise.

    Eager collectives do so by themselves. A ``tf.function`` raises classes of ``tf.errors``, whose text has
    sparkvod's; call it within this to catch ``HorovodInternalError`` or ``MismatchError``.
    """
    try:
        yield
    except tf.errors.OpError as error:
        own = translated(error)
        if own is error:
            raise
        raise own from error
