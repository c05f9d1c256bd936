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
    # Functions have their bare names there, and classes of scripts, notebooks and functions no module that has them:
    # they are looked for where they are in use.
    wanted = set(_names(config)) - found.keys()
    if wanted:
        compiled = getattr(getattr(model, "_compile_config", None), "config", {})
        in_use: list[Any] = [list(compiled.values())]
        for layer in model._flatten_layers():
            in_use += [layer, *vars(layer).values()]
        found |= _wanted(wanted, in_use)
    return found


def found_in_parts(parts: Any) -> dict[str, Any]:
    """Returns the same of losses, metrics and an optimizer, with the schedules and functions that they are made of.

    Args:
        parts: objects of Keras that have a configuration, in lists and dicts too.
    """
    found = names_of(parts)
    for part in _flat(parts):
        if not hasattr(part, "get_config") or isinstance(part, type):
            continue
        config = part.get_config()
        _walk(config, found)
        within = list(vars(part).values())
        within += [value for inner in within if hasattr(inner, "get_config") for value in vars(inner).values()]
        found |= _wanted(set(_names(config)) - found.keys(), within)
    return found


def _wanted(wanted: set[str], in_use: list[Any]) -> dict[str, Any]:
    """Returns those of classes and functions in use, or else of the script itself, that have a name that is wanted."""
    own = [value for value in in_use if callable(value) or isinstance(value, (list, tuple, dict))]
    used = {name: thing for name, thing in names_of(own).items() if name in wanted}
    script = vars(sys.modules["__main__"])
    there = {name: script[name] for name in wanted - used.keys() if callable(script.get(name))}
    return {**there, **used}


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [part for item in value for part in _flat(item)]
    return [value]


def _names(value: Any) -> Iterator[str]:
    """Yields the names of functions, and of classes of no module of Keras's, in a configuration."""
    if isinstance(value, dict):
        if isinstance(value.get("class_name"), str) and "config" in value:
            if value["class_name"] == "function" and isinstance(value["config"], str):
                yield value["config"]
            elif str(value.get("module")).partition(".")[0] not in ("keras", "builtins"):
                yield value["class_name"]
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _names(item)


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
