"""Functions, classes and rows that are Python objects, as files that workers and later runs can read.

A function that can be imported by name stays where it is. Of one that cannot (from a script that is running, or a cell
of a notebook) the source is written to a module, with the imports, functions, classes and constants that it uses.
Nothing is pickled, and no code of the script but these definitions runs again.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import re
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from torchtitan.errors import UserError

FOLDER = "from_python"
HEAD = "from __future__ import annotations\n"


def names_of(
    things: Iterable[str | Callable[..., Any]], folder: Path, what: str, kind: type = FunctionType
) -> list[str]:
    """What to write in a configuration: names as they are, functions and classes as module:name, in `folder` if need
    be. Messages call them `what`.

    Raises:
        UserError: one that cannot be imported, and whose source cannot stand alone.
    """
    return [thing if isinstance(thing, str) else _name(thing, folder, what, kind) for thing in things]


def write_rows(rows: Iterable[Mapping[str, Any]], folder: Path) -> str:
    """Rows as a .jsonl file in `folder`; its path. Raises UserError for what JSON cannot hold."""
    lines = []
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise UserError(f"dataset, row {number}: must be a dict of columns, found {type(row).__name__}")
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n")
        except (TypeError, ValueError) as error:
            raise UserError(f"dataset, row {number}: JSON cannot hold it: {error}") from error
    if not lines:
        raise UserError("dataset: there are no rows")
    return str(_write(folder, "rows", "".join(lines), ".jsonl"))


def _name(function: Callable[..., Any], folder: Path, what: str, kind: type) -> str:
    if (name := _importable(function)) is not None:
        return name
    if not isinstance(function, kind):
        made = "function (def)" if kind is FunctionType else "class"
        raise UserError(f"{what} {function!r}: must be a {made}, or one that a module has by its name")
    parts: dict[str, str] = {}
    _collect(function.__name__, function, f"{what} {function.__name__}", parts)
    path = _write(folder, "own", HEAD + "\n".join(parts.values()) + "\n", ".py")
    return f"{path.stem}:{function.__name__}"


def _importable(thing: Any) -> str | None:
    """`module:name` where importing the module gives this very object, without running the script again."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__name__", None)
    found = sys.modules.get(module or "")
    if found is None or module == "__main__" or getattr(found, "__spec__", None) is None:
        return None
    return f"{module}:{name}" if name and getattr(found, name, None) is thing else None


def _collect(name: str, value: Any, user: str, parts: dict[str, str]) -> None:
    """Add what defines `name` to `parts`, after all that it uses itself."""
    if name in parts:
        return
    if isinstance(value, ModuleType):
        parts[name] = f"import {value.__name__} as {name}"
    elif (importable := _importable(value)) is not None:
        module, _, original = importable.partition(":")
        parts[name] = f"from {module} import {original} as {name}"
    elif isinstance(value, (FunctionType, type)):
        parts[name] = ""  # it may use itself
        source = _source(name, value, user)
        namespace = value.__globals__ if isinstance(value, FunctionType) else vars(sys.modules[value.__module__])
        if (namesake := namespace.get(value.__name__, value)) is not value and namesake is not None:
            raise UserError(
                f"{user}: {name} was defined as {value.__name__}, which is something else by now: rename one"
            )
        for used in _used_names(source, user):
            if used in namespace and used != name:
                _collect(used, namespace[used], user, parts)
        del parts[name]
        parts[name] = source if value.__name__ == name else f"{source}\n{name} = {value.__name__}"
    elif isinstance(value, re.Pattern):
        parts[name] = f"import re\n{name} = re.compile({value.pattern!r}, {int(value.flags)})"
    elif _is_constant(value):
        parts[name] = f"{name} = {value!r}"
    else:
        raise UserError(
            f"{user}: uses {name}, a {type(value).__name__} that exists only in this process, but it runs in "
            "worker processes: make it inside of the function, or put both into a module and import that"
        )


def _source(name: str, value: Any, user: str) -> str:
    advice = "write it as a plain function (def) at the top level of a script, a cell or a module"
    if isinstance(value, FunctionType):
        if value.__name__ == "<lambda>":
            raise UserError(f"{user}: a lambda has no name to be found by; {advice}")
        if value.__code__.co_freevars:
            names = ", ".join(value.__code__.co_freevars)
            raise UserError(f"{user}: it is a closure over {names}, which worker processes do not have; {advice}")
    try:
        return textwrap.dedent(inspect.getsource(value)).rstrip("\n")
    except (OSError, TypeError) as error:
        raise UserError(f"{user}: the source of {name} cannot be had ({error}); {advice}") from error


def _used_names(source: str, user: str) -> list[str]:
    """Global names that a definition reads; with HEAD, annotations are not among them. Raises UserError."""

    def read(table: symtable.SymbolTable) -> Iterator[str]:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module"):
                yield symbol.get_name()
        for inner in table.get_children():
            yield from read(inner)

    try:
        return list(dict.fromkeys(read(symtable.symtable(HEAD + source, "source", "exec"))))
    except SyntaxError as error:
        raise UserError(f"{user}: its source cannot stand alone ({error.msg}); write it at the top level") from error


def _is_constant(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def _write(folder: Path, stem: str, text: str, suffix: str) -> Path:
    """The file of this content, whose name tells it from others: a later run in the same folder changes nothing."""
    path = folder / f"{stem}_{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}{suffix}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # In one piece: another run's worker may be importing it.
        unfinished = path.with_suffix(f".{os.getpid()}.part")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    return path
