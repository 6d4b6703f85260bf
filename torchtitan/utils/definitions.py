"""Functions and classes named `package.module:name`, found in the module's source without running any of it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


@dataclass(frozen=True)
class Definition:
    """A function or a class at the top level of a module."""

    file: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

    def __str__(self) -> str:
        return f"{self.file}, line {self.node.lineno}"


def definition_of(name: str) -> Definition | None:
    """Return the definition of `package.module:name`; None where only running the module would tell what the name is:
    it is decorated, bound or changed by another statement, or no definition."""
    module, _, wanted = name.partition(":")
    try:
        spec = find_module(module)
        if spec is None or not (spec.origin or "").endswith(".py"):
            return None
        body = ast.parse(Path(str(spec.origin)).read_bytes()).body
    except Exception:  # raised by user code, too: the parent package had to be imported
        return None
    found = [node for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
    found = [node for node in found if node.name == wanted and not node.decorator_list]
    if len(found) != 1 or list(bound_names(body)).count(wanted) != 1 or wanted in _changed_names(body):
        return None
    return Definition(str(spec.origin), found[0])


def signature_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> inspect.Signature:
    """Return the parameters of a function from its source, with None for every default."""
    arguments, parameter = function.args, inspect.Parameter
    positional = [*arguments.posonlyargs, *arguments.args]
    without_default = len(positional) - len(arguments.defaults)
    parameters = []
    for number, argument in enumerate(positional):
        is_positional = number < len(arguments.posonlyargs)
        kind = parameter.POSITIONAL_ONLY if is_positional else parameter.POSITIONAL_OR_KEYWORD
        default = parameter.empty if number < without_default else None
        parameters.append(parameter(argument.arg, kind, default=default))
    if arguments.vararg:
        parameters.append(parameter(arguments.vararg.arg, parameter.VAR_POSITIONAL))
    for argument, given in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        default = parameter.empty if given is None else None
        parameters.append(parameter(argument.arg, parameter.KEYWORD_ONLY, default=default))
    if arguments.kwarg:
        parameters.append(parameter(arguments.kwarg.arg, parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def required_names(signature: inspect.Signature) -> list[str]:
    """Return the parameters that a call must give a value."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind not in variable and parameter.default is inspect.Parameter.empty
    ]


def _changed_names(body: Sequence[ast.stmt]) -> set[str]:
    """Return the names of which a module's statements set attributes, such as a tool's __doc__."""
    inner = (node for statement in body for node in ast.walk(statement))
    return {
        node.value.id
        for node in inner
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name)
    }


def find_module(name: str) -> ModuleSpec | None:
    """Like importlib.util.find_spec, but import parent packages only if their files do not lead to the module."""
    parts = name.split(".")
    spec = importlib.util.find_spec(parts[0])
    for i in range(2, len(parts) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        try:
            spec = PathFinder.find_spec(".".join(parts[:i]), list(spec.submodule_search_locations))
        except KeyError:  # a namespace package's path is not known before its parent is imported
            spec = None
        if spec is None:
            return importlib.util.find_spec(name)
    return spec


def is_installed(package: str) -> bool:
    """Whether a package can be imported. A folder without modules, such as the one that wandb writes to the working
    folder, has its name and is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def bound_names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module's statements bind, also inside `if`, `try` and `with`; `*` for a star import."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                yield inner.id
        for part in ("body", "orelse", "finalbody"):
            yield from bound_names(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from bound_names(handler.body)
