"""Strategies by name: those that ship, those of installed plugins, and any class named as `package.module:Class`."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import typing
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from sapus_cli.errors import UserError, unknown
from sapus_cli.strategy import fault_of
from strategies import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sapus_cli.strategy import AnyStrategy

GROUP = "sapus.strategies"
Value = bool | int | float | str


def sources() -> dict[str, str]:
    """Every known name and where its class stands, as "module:Class"; what ships goes before plugins."""
    plugins = {point.name: point.value for point in entry_points(group=GROUP)}
    return plugins | REGISTRY


def strategy_class(name: str) -> type[AnyStrategy]:
    """The class behind a name, or behind "package.module:Class".

    Raises:
        UserError: there is none, it cannot be imported, or it is no strategy (says which method).
    """
    where = name
    if ":" not in name:
        known = sources()
        if name not in known:
            raise unknown("strategy", name, known, "Or name a class of your own as package.module:Class.")
        where = known[name]
    module_name, _, class_name = where.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), class_name)):
        raise UserError(f"strategy '{name}': '{where}' is not of the form package.module:Class")
    cls = getattr(_module(name, module_name), class_name, None)
    if cls is None:
        raise UserError(f"strategy '{name}': the module {module_name} has no class {class_name}; correct the name")
    if fault := fault_of(cls):
        raise UserError(f"strategy '{name}': {class_name} is not a strategy: {fault}")
    return typing.cast("type[AnyStrategy]", cls)


def build(name: str, params: Mapping[str, Value]) -> AnyStrategy:
    """A strategy with its hyper-parameters; those not given keep their defaults.

    Values may be text, as they come from a command line; they are converted to the type of the hyper-parameter.

    Raises:
        UserError: unknown strategy or hyper-parameter, or a value of the wrong type or range.
    """
    cls = strategy_class(name)
    types = hyper_parameters(cls)
    values = {}
    for key, value in params.items():
        if key not in types:
            raise unknown(f"hyper-parameter of {name}", key, types)
        values[key] = _convert(name, key, value, types[key])
    try:
        return cls(**values)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise UserError(f"strategy {name}: {error}") from error


def hyper_parameters(cls: type[AnyStrategy]) -> dict[str, Any]:
    """Names and types of a strategy's hyper-parameters.

    Raises:
        UserError: a type is named that cannot be looked up.
    """
    try:
        hints = get_type_hints(cls)
    except NameError as error:
        raise UserError(
            f"strategy {cls.__name__}: {error}; import what its hyper-parameters are annotated with at run time"
        ) from error
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]


def type_name(kind: Any) -> str:
    """How a hyper-parameter's type is written for people."""
    if get_origin(kind) is Literal:
        return " | ".join(map(repr, get_args(kind)))
    return getattr(kind, "__name__", str(kind))


@dataclasses.dataclass(frozen=True)
class Description:
    """A strategy's docstring, taken apart.

    Attributes:
        summary: first line.
        rule: the update rule.
        source: where it comes from.
        meanings: hyper-parameter -> what it means, its range, its default and where that comes from.
    """

    summary: str
    rule: str
    source: str
    meanings: dict[str, str]


def describe(cls: type[AnyStrategy]) -> Description:
    """Read summary, `Rule:`, `Source:` and `Hyper-parameters:` out of a strategy's docstring."""
    lines = inspect.cleandoc(cls.__doc__ or "").splitlines()
    parts: dict[str, list[str]] = {"Rule": [], "Source": [], "Hyper-parameters": []}
    current: list[str] | None = None
    for line in lines[1:]:
        head, colon, rest = line.partition(":")
        if colon and head in parts:
            current = parts[head]
            current.append(rest.strip())
        elif not line.strip():
            current = None if current is not parts["Hyper-parameters"] else current
        elif current is not None:
            current.append(line)
    meanings: dict[str, str] = {}
    key = ""
    for line in parts["Hyper-parameters"]:
        head, colon, rest = line.strip().partition(":")
        if colon and head.isidentifier() and line.startswith("    ") and not line.startswith("     "):
            key = head
            meanings[key] = rest.strip()
        elif key and line.strip():
            meanings[key] += " " + line.strip()
    return Description(
        summary=lines[0] if lines else "",
        rule=" ".join(part.strip() for part in parts["Rule"]),
        source=" ".join(part.strip() for part in parts["Source"]),
        meanings=meanings,
    )


def _module(name: str, module_name: str) -> Any:
    here = str(Path.cwd())
    if ":" in name and here not in sys.path:
        # A console script does not look into the working directory, where a user's own strategy usually stands.
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        kind = type(error).__name__
        raise UserError(f"strategy '{name}': cannot import {module_name}: {kind}: {error}") from error


def _convert(strategy: str, key: str, value: Value, kind: Any) -> Value:
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    text = str(value).strip()
    try:
        if choices:
            named: dict[str, Value] = {str(choice): choice for choice in choices}
            return named[text]
        if kind is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        if kind is int:
            return int(text)
        if kind is float:
            return float(text)
    except (KeyError, ValueError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}.get(kind) or type_name(kind)
        raise UserError(f"strategy {strategy}: {key} = {text}: must be {wanted}") from None
    return text
