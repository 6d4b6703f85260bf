"""A configuration under examination: what the rules look at, and where they put what they find.

Whether what it names as `package.module:name` is there is found without running any of that module's code.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from torchtitan.config.job_config import JobConfig
from torchtitan.config.reading import Problem
from torchtitan.config.values import show
from torchtitan.errors import nearest
from torchtitan.rollout.rewards import BUILTIN


@dataclass
class Check:
    """One look at a whole configuration, whose values are each allowed by themselves."""

    config: JobConfig
    ranks: int
    planning: bool
    """Nothing will be started, so what a start needs is not looked for"""
    wrong: frozenset[str] = frozenset()
    """Keys that were refused before and hold their defaults now: what follows from them is not refused again"""
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, key: str, when: object, text: str, value: object = None) -> None:
        """Refuse the value of `table.key` (or `value`, a part of it) where `when` is true."""
        if when:
            shown = show(self.get(key) if value is None else value)
            self.say(key, f"{key} = {shown} is not allowed: {text}")

    def say(self, key: str, text: str) -> None:
        """Note a problem in words of its own."""
        problem = Problem(key, text)
        if not problem.follows_from(self.wrong):
            self.problems.append(problem)

    def get(self, key: str) -> object:
        """The value of `table.key`."""
        table, _, name = key.partition(".")
        return getattr(getattr(self.config, table), name)


def reward_problem(name: str) -> str | None:
    """What is wrong with the name of a reward function; None where nothing is, or where only running it would tell."""
    return name_problem(name, "reward function", BUILTIN)


def name_problem(name: str, what: str, built_in: Collection[str] = ()) -> str | None:
    """What is wrong with the name of a function or class, which messages call `what`."""
    if name in built_in:
        return None
    module, _, function = name.partition(":")
    if not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        choice = f"one of {', '.join(built_in)}, or " if built_in else ""
        allowed = f"must be {choice}package.module:function"
        return f"unknown {what} {show(name)}: {allowed}{nearest(name, built_in)}"
    try:
        spec = _find_module(module)
    except Exception as error:  # of user code: the parent package had to be imported
        return f"{what} {show(name)}: module {module} cannot be found: {type(error).__name__}: {error}"
    if spec is None:
        looked = f"is not on the Python path (the working folder is {Path.cwd()})"
        return f"{what} {show(name)}: module {module} {looked}"
    if spec.origin is None:
        return f"{what} {show(name)}: {module} is a folder, not a module"
    if not spec.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(spec.origin).read_bytes(), spec.origin)
    except (OSError, SyntaxError, ValueError) as error:
        return f"{what} {show(name)}: {spec.origin} cannot be read as Python: {error}"
    known = set(_names(tree.body))
    if function in known or "*" in known or "__getattr__" in known:
        return None
    return f"{what} {show(name)}: {spec.origin} has no {function}{nearest(function, known)}"


def _find_module(name: str) -> ModuleSpec | None:
    """Like importlib.util.find_spec, but parent packages are only imported where their files do not tell."""
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


def _names(body: list[ast.stmt]) -> Iterator[str]:
    """Names that a module's statements bind, those inside of `if`, `try` and `with` included; `*` of a star import."""
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
            yield from _names(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from _names(handler.body)
