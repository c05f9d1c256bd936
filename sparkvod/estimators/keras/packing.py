"""Keras's models, optimizers, losses and metrics as bytes: for the workers, for saving, for predicting.

A model travels as a ``.keras`` file. What of its classes and functions is not Keras's own goes along in the same
archive, pickled, as a member that Keras passes over.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from sparkvod.errors import DataError
from sparkvod.estimators.keras.attributes import Attributes, attributes_of, give, untracked
from sparkvod.estimators.keras.custom import found_in
from sparkvod.estimators.parts import dump_part

_OBJECTS = "sparkvod_objects.pkl"
_POLICY = "sparkvod_policy.txt"
_TRAINABLE = "sparkvod_trainable.json"
_LENGTH = struct.Struct("<q")


def dump_model(model: Any, custom_objects: Mapping[str, Any] | None = None, bare: bool = True) -> bytes:
    """Returns a model as a ``.keras`` file, with the classes and functions of its own that it is made of.

    Args:
        model: a model of Keras 3.
        custom_objects: further classes and functions by name.
        bare: without optimizer, loss and metrics.

    Raises:
        TypeError: the model cannot be saved.
    """
    with tempfile.TemporaryDirectory(prefix="sparkvod-") as folder:
        path = Path(folder) / "model.keras"
        try:
            with warnings.catch_warnings(), _bare(model) if bare else warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*not yet been built.*")
                model.save(path)
        except Exception as error:
            raise TypeError(
                f"model of class {type(model).__name__} cannot be saved as a .keras file ({type(error).__name__}: "
                f"{error}), a model that can was expected; give its own layers a get_config()"
            ) from error
        with zipfile.ZipFile(path) as archive:
            config = json.loads(archive.read("config.json"))
        objects = {**found_in(config, model), **(custom_objects or {})}
        with zipfile.ZipFile(path, "a") as archive:
            if objects:
                archive.writestr(_OBJECTS, dump_part("custom_objects", objects))
            archive.writestr(_POLICY, policy_name())
            # Of single weights the configuration does not have it, only of layers.
            archive.writestr(_TRAINABLE, json.dumps([bool(weight.trainable) for weight in model.weights]))
        return path.read_bytes()


def is_model(content: bytes) -> bool:
    """Return whether bytes are what :func:`dump_model` writes."""
    return zipfile.is_zipfile(io.BytesIO(content))


@contextmanager
def _bare(model: Any) -> Iterator[None]:
    """Takes the optimizer, whose state may be several times the model, from a compiled model for a while."""
    if not getattr(model, "compiled", False):
        yield
        return
    optimizer, model.optimizer, model.compiled = model.optimizer, None, False
    try:
        yield
    finally:
        model.optimizer, model.compiled = optimizer, True


def load_model(content: bytes, compiled: bool = False) -> Any:
    """Returns the model that :func:`dump_model` wrote.

    Args:
        content: the file's bytes.
        compiled: with optimizer, loss and metrics, if they were saved.

    Raises:
        DataError: a newer Keras wrote it, or it cannot be made again from its configuration.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        written = str(json.loads(archive.read("metadata.json")).get("keras_version", "0"))
        objects = pickle.loads(archive.read(_OBJECTS)) if _OBJECTS in archive.namelist() else {}
        policy = archive.read(_POLICY).decode() if _POLICY in archive.namelist() else policy_name()
        trainable = json.loads(archive.read(_TRAINABLE)) if _TRAINABLE in archive.namelist() else []
    if _version(written) > _version(keras.__version__):
        raise DataError(
            f"a model that Keras {written} saved was found, and this Python has Keras {keras.__version__}: the same "
            "Keras, or a newer one, was expected; install it here, or on the executors"
        )
    with tempfile.TemporaryDirectory(prefix="sparkvod-") as folder:
        path = Path(folder) / "model.keras"
        path.write_bytes(content)
        with warnings.catch_warnings(), under_policy(policy):
            warnings.filterwarnings("ignore", message=".*optimizer.*variables.*")
            try:
                # Lambdas are what this very model had; pickled classes are run anyway.
                model = keras.models.load_model(path, custom_objects=objects, compile=compiled, safe_mode=False)
            except Exception as error:
                raise DataError(
                    f"the model cannot be made again from its .keras file ({type(error).__name__}: {error}); give its "
                    "own layers a get_config() with all that their constructors need, and pass what Keras cannot "
                    "find by custom_objects={'name': class or function}"
                ) from error
    if len(model.weights) == len(trainable):
        for weight, flag in zip(model.weights, trainable, strict=True):
            if weight.trainable != flag:
                weight.trainable = flag
    return model


def policy_name() -> str:
    """Returns the name of the dtype policy that layers have which are given none; floatx for one of the user's own."""
    name = str(keras.config.dtype_policy().name)
    try:
        keras.dtype_policies.get(name)
    except ValueError:
        return str(keras.backend.floatx())
    return name


@contextmanager
def under_policy(policy: str) -> Iterator[None]:
    """Makes models by the dtype policy that was everybody's where they were made: not all layers are saved with it."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _version(text: str) -> tuple[int, ...]:
    numbers = text.split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, number)) or 0) for number in numbers)


# ---- losses, metrics, optimizers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """An object of Keras as its class, its configuration and further attributes, which travel where it does not."""

    cls: type
    config: dict[str, Any]
    attributes: Attributes = ()


@dataclass(frozen=True)
class WithObjects:
    """What was taken apart, with the classes and functions that it is made of and Keras does not find."""

    value: Any
    custom_objects: dict[str, Any]


def taken_apart(value: Any, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Return a value with objects of Keras, in lists and dicts too, as what they are made again from.

    Args:
        value: the value.
        custom_objects: classes and functions by name that Keras needs to make the objects again.

    Raises:
        ValueError: an object has an attribute that cannot be pickled and is not in its configuration.
    """
    known = custom_objects or {}
    if isinstance(value, (list, tuple)):
        return [taken_apart(item, known) for item in value]
    if isinstance(value, dict):
        return {name: taken_apart(item, known) for name, item in value.items()}
    if isinstance(value, type) or not hasattr(value, "get_config"):
        return value
    cls = type(value)
    return Made(getattr(cls, "_sparkvod_plain", cls), untracked(value.get_config()), attributes_of(value, known))


def put_together(value: Any, custom_objects: Mapping[str, Any]) -> Any:
    """Returns what :func:`taken_apart` took apart, as new objects."""
    if isinstance(value, WithObjects):
        return put_together(value.value, {**value.custom_objects, **custom_objects})
    if isinstance(value, list):
        return [put_together(item, custom_objects) for item in value]
    if isinstance(value, dict):
        return {name: put_together(item, custom_objects) for name, item in value.items()}
    if not isinstance(value, Made):
        return value
    with keras.saving.custom_object_scope(dict(custom_objects)):
        made = value.cls.from_config(dict(value.config))  # type: ignore[attr-defined]
    give(made, value.attributes)
    return made


# ---- variables ------------------------------------------------------------------------------------------------------


def dump_variables(variables: Sequence[Any]) -> bytes:
    """Returns variables' values as bytes: dtypes and shapes as JSON, its length before it, then their memory."""
    values = [np.ascontiguousarray(keras.ops.convert_to_numpy(variable)) for variable in variables]
    shapes = [list(variable.shape) for variable in variables]  # ascontiguousarray makes a list of a scalar
    header = json.dumps([[v.dtype.name, shape] for v, shape in zip(values, shapes, strict=True)]).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *(value.reshape(-1).view(np.uint8).data for value in values)])


def load_variables(variables: Sequence[Any], content: bytes) -> None:
    """Gives variables the values that :func:`dump_variables` wrote.

    Raises:
        DataError: there are others, or of other shapes.
        ValueError: the bytes are something else.
    """
    values = _arrays(content)
    found = [tuple(variable.shape) for variable in variables]
    expected = [value.shape for value in values]
    if found != expected:
        raise DataError(
            f"variables of the shapes {_few(found)} were found, {_few(expected)} were expected; the same model, "
            "built alike, is needed"
        )
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value.copy())  # some backends would keep the memory


def _arrays(content: bytes) -> list[np.ndarray]:
    """Returns arrays over the memory of what :func:`dump_variables` wrote; nothing is unpickled."""
    (length,) = _LENGTH.unpack_from(content)
    at, values = _LENGTH.size + length, []
    for name, shape in json.loads(content[_LENGTH.size : at]):
        dtype, count = np.dtype(name), math.prod(shape)
        values.append(np.frombuffer(content, dtype, count, at).reshape(shape))
        at += count * dtype.itemsize
    if at != len(content):
        raise ValueError(f"the model's variables need {at} bytes, got {len(content)}")
    return values


def _few(shapes: list[tuple[int, ...]]) -> str:
    return f"{len(shapes)}: {', '.join(str(list(shape)) for shape in shapes[:4])}{', ...' * (len(shapes) > 4)}"


def digest(content: bytes) -> bytes:
    """Returns a hash of a ``.keras`` file that is the same for the same model, whenever it was saved."""
    hashed = hashlib.sha256()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for entry in archive.infolist():
            if entry.filename != "metadata.json":  # which has the date
                hashed.update(entry.filename.encode() + b"\0" + archive.read(entry))
    return hashed.digest()
