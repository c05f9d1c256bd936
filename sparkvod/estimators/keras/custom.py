"""Which classes and functions a model is made of that are not Keras's own: they go where the model goes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import keras


def found_in(config: Any, model: Any) -> dict[str, Any]:
    """Returns classes and functions that a saved model's configuration names, by the names that Keras looks for.

    Args:
        config: the configuration as JSON values.
        model: the model.
    """
    found: dict[str, Any] = {}
    _walk(config, found)
    # Of functions the configuration has the bare name, so they are looked for where they are in use.
    wanted = set(_functions(config)) - found.keys()
    if wanted:
        used = [list(vars(layer).values()) for layer in model._flatten_layers()]
        compiled = getattr(getattr(model, "_compile_config", None), "config", {})
        for values in [*used, list(compiled.values())]:
            own = [value for value in values if callable(value) or isinstance(value, (list, tuple, dict))]
            found |= {name: thing for name, thing in names_of(own).items() if name in wanted}
    return found


def _functions(value: Any) -> Iterator[str]:
    """Yields the names of functions in a configuration."""
    if isinstance(value, dict):
        if value.get("class_name") == "function" and isinstance(value.get("config"), str):
            yield value["config"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _functions(item)


def _walk(value: Any, found: dict[str, Any]) -> None:
    if isinstance(value, list):
        for item in value:
            _walk(item, found)
        return
    if not isinstance(value, dict):
        return
    name = value.get("class_name")
    if isinstance(name, str) and "config" in value:
        if name == "function" and isinstance(value["config"], str):
            name = value["config"]
        _resolve(value.get("module"), name, value.get("registered_name"), found)
    for item in value.values():
        _walk(item, found)


def _resolve(module: Any, name: str, registered: Any, found: dict[str, Any]) -> None:
    if isinstance(module, str) and module.partition(".")[0] in ("keras", "builtins"):
        return
    thing = keras.saving.get_registered_object(registered) if isinstance(registered, str) else None
    if thing is None and isinstance(module, str):
        thing = getattr(sys.modules.get(module), name, None)
    if thing is None or str(getattr(thing, "__module__", "")).partition(".")[0] == "keras":
        return
    found[name] = thing
    if isinstance(registered, str):
        found[registered] = thing


def names_of(*values: Any) -> dict[str, Any]:
    """Returns classes and functions that were passed as losses, metrics or an optimizer, by name."""
    found: dict[str, Any] = {}
    for value in values:
        if isinstance(value, dict):
            found |= names_of(*value.values())
        elif isinstance(value, (list, tuple)):
            found |= names_of(*value)
        elif value is not None and not isinstance(value, (str, int, float)):
            thing = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
            is_named = hasattr(thing, "__name__")
            if is_named and str(getattr(thing, "__module__", "")).partition(".")[0] != "keras":
                found[keras.saving.get_registered_name(thing)] = found[thing.__name__] = thing
    return found
