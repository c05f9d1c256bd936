"""The ops' library: loaded once, beside TensorFlow's own, and connected to the engine."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from typing import Any

import tensorflow as tf

from sparkvod import _native


@functools.cache
def load() -> Any:
    """Returns the module of the raw ops.

    Raises:
        ImportError: the library is missing, or this TensorFlow cannot hold its ops; the message says why.
    """
    spec = importlib.util.find_spec("sparkvod._tensorflow_ops")
    if spec is None or spec.origin is None:
        raise ImportError(
            "the library of TensorFlow's ops was not found, sparkvod/_tensorflow_ops*.so was expected beside the "
            "engine; install sparkvod again"
        )
    module = tf.load_op_library(spec.origin)
    connect = ctypes.CDLL(spec.origin).sparkvod_tensorflow_connect
    connect.restype, connect.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    trouble = connect(_native.ops_table()).decode()
    if trouble:
        raise ImportError(f"sparkvod.tensorflow does not work with TensorFlow {tf.__version__}: {trouble}")
    return module
