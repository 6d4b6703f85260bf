"""The state of a configuration check: the input of the rules and the problems that they report.

A name such as `package.module:name` is looked up without running any of that module's code.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan.config.job_config import JobConfig, value_at
from torchtitan.config.reading import Problem
from torchtitan.config.values import show
from torchtitan.errors import nearest
from torchtitan.rollout.data.own_code import function_problem
from torchtitan.rollout.rewards import BUILTIN
from torchtitan.utils.definitions import bound_names, definition_of, find_module, signature_of

OWN_ARGUMENTS = {
    "grpo.loss_type": (("log_probs", "log_ratio", "advantages", "options"), "sequences"),
    "grpo.advantage": (("rewards", "tokens"), ""),
    "grpo.off_policy_correction": (("ratio", "options"), "sequences"),
    "grpo.group_filter": (("group",), ""),
    "rollout.sampler": (("means", "variances", "groups", "typical"), ""),
}
"""Keys that may name a function of the user's that this program calls -> its arguments, and one that it may take"""


@dataclass
class Check:
    """A check of a whole configuration, whose values have already been validated one by one."""

    config: JobConfig
    ranks: int
    planning: bool
    """Nothing will be started, so the requirements of a start (files, packages, devices) are not checked"""
    wrong: frozenset[str] = frozenset()
    """Keys that were refused earlier and now have their defaults; problems that follow from them are not reported"""
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, key: str, when: object, text: str, value: object = None) -> None:
        """Refuse the value of `table.key` (or `value`, a part of it) if `when` is true."""
        if when:
            shown = show(self.get(key) if value is None else value)
            self.say(key, f"{key} = {shown} is not allowed: {text}")

    def say(self, key: str, text: str) -> None:
        """Report a problem with a custom message."""
        problem = Problem(key, text)
        if not problem.follows_from(self.wrong):
            self.problems.append(problem)

    def get(self, key: str) -> object:
        """Return the value of `table.key`."""
        value: object = value_at(self.config, key)
        return value


def reward_problem(name: str) -> str | None:
    """Return what is wrong with the name of a reward function; None if nothing is, or if only running it would tell."""
    return name_problem(name, "reward function", BUILTIN)


def name_problem(name: str, what: str, built_in: Collection[str] = ()) -> str | None:
    """Return what is wrong with the name of a function or class, which messages call `what`; None if nothing is."""
    if name in built_in:
        return None
    module, _, function = name.partition(":")
    if not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        choice = f"one of {', '.join(built_in)}, or " if built_in else ""
        allowed = f"must be {choice}package.module:function"
        return f"unknown {what} {show(name)}: {allowed}{nearest(name, built_in)}"
    try:
        spec = find_module(module)
    except Exception as error:  # raised by user code: the parent package had to be imported
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
    known = set(bound_names(tree.body))
    if function in known or "*" in known or "__getattr__" in known:
        return None
    return f"{what} {show(name)}: {spec.origin} has no {function}{nearest(function, known)}"


def own_function_problem(name: str, key: str) -> str | None:
    """Return why a function of the user's cannot be what this key needs; None if it can."""
    return name_problem(name, "function") or function_problem(name, "function", *OWN_ARGUMENTS[key])


def may_take(name: str, parameter: str) -> bool:
    """Whether a function `package.module:function` may have such a parameter: without running its module, only a
    definition there shows that it has none."""
    if ":" not in name or name_problem(name, "function"):
        return False
    found = definition_of(name)
    return found is None or isinstance(found.node, ast.ClassDef) or parameter in signature_of(found.node).parameters
