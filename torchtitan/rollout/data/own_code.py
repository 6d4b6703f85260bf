"""Whether a reward function, an environment or a tool of the user's can be called as the run will call it. Their
sources are read; none of their code runs."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Sequence

from torchtitan.config.job_config import JobConfig
from torchtitan.errors import nearest
from torchtitan.rollout.environments import NO_DOCSTRING, NO_RESET, no_type
from torchtitan.rollout.rewards import ARGUMENTS
from torchtitan.utils.definitions import bound_names, definition_of, required_names, signature_of

Function = ast.FunctionDef | ast.AsyncFunctionDef


def columns_for_rewards(config: JobConfig, columns: Iterable[str]) -> set[str]:
    """Return the names under which reward functions get these columns of a dataset."""
    named = set(columns)
    if config.rewards.answer_column in named:
        named.add("answer")
    return named - {config.rollout.prompt_column}


def reward_call_problem(name: str, columns: Collection[str] | None, has_environment: bool) -> str | None:
    """Return why the reward function `package.module:function` cannot be called with TRL's convention; None if it can,
    or if only a call would tell.

    columns: those of the dataset but for the prompt, with `answer`; None if they are not known yet.
    """
    found = definition_of(name)
    if found is None or isinstance(found.node, ast.ClassDef):
        return None
    signature = signature_of(found.node)
    takes_all = found.node.args.kwarg is not None
    given = ARGUMENTS if has_environment else ARGUMENTS - {"environments"}
    where = f"reward function {name!r} ({found})"
    if found.node.args.posonlyargs:
        return f"{where}: its arguments are passed by name: leave out the `/`"
    if not takes_all:
        return f"{where}: it must end with **kwargs, because it also gets {', '.join(sorted(given))} and all columns"
    if columns is None:
        return None
    unknown = [needed for needed in required_names(signature) if needed not in given and needed not in columns]
    if not unknown:
        return None
    return f"{where}: no row of the dataset has a column {_listed(unknown, columns, given)}"


def environment_call_problem(name: str, columns: Collection[str] | None) -> str | None:
    """Return why the class `package.module:Class` cannot be used as an environment; None if it can, or if only an
    instance would tell.

    columns: those of the dataset; None if they are not known yet.
    """
    found = definition_of(name)
    # A function may return environments, and a class may have methods of others.
    if found is None or not isinstance(found.node, ast.ClassDef) or found.node.bases or found.node.keywords:
        return None
    where = f"environment {name!r} ({found})"
    methods = {node.name: node for node in found.node.body if isinstance(node, Function)}
    if "reset" not in bound_names(found.node.body):
        return f"{where}: {NO_RESET}"
    step, reset = methods.get("step"), methods.get("reset")
    if step is not None and not step.decorator_list and (problem := arity_problem(step, ["self", "action"])):
        return f"{where}: step {problem}"
    if reset is None or reset.decorator_list or columns is None:
        return None
    unknown = [needed for needed in required_names(signature_of(reset))[1:] if needed not in columns]
    if not unknown:
        return None
    return f"{where}: reset gets the columns of a row, and no row has a column {_listed(unknown, columns, ())}"


def tool_problem(name: str) -> str | None:
    """Return why the function `package.module:function` cannot be a tool; None if it can, or if only running its module
    would tell."""
    found = definition_of(name)
    if found is None or isinstance(found.node, ast.ClassDef):
        return None
    where, arguments = f"tool {name!r} ({found})", found.node.args
    if not ast.get_docstring(found.node):
        return f"{where}: {NO_DOCSTRING}"
    for argument in (*arguments.args, *arguments.kwonlyargs):
        if argument.annotation is None:
            return f"{where}: {no_type(argument.arg)}"
    return None


def function_problem(name: str, what: str, arguments: Sequence[str], optional: str = "") -> str | None:
    """Return why the function `package.module:function`, which messages call `what`, cannot be called with these
    arguments by position, and with one more by its name if it takes that; None if it can, or if only a call would
    tell."""
    found = definition_of(name)
    if found is None or isinstance(found.node, ast.ClassDef):
        return None
    problem = arity_problem(found.node, arguments, optional)
    return problem and f"{what} {name!r} ({found}) {problem}"


def arity_problem(function: Function, arguments: Sequence[str], optional: str = "") -> str | None:
    """Return why a function cannot be called with these arguments; see function_problem."""
    signature = signature_of(function)
    named = {optional: None} if optional in signature.parameters else {}
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        rest = f", and {optional} if it takes that" if optional else ""
        return f"cannot be called with ({', '.join(arguments)}{rest}): {error}"
    return None


def _listed(unknown: Sequence[str], columns: Collection[str], given: Collection[str]) -> str:
    names = ", ".join(map(repr, unknown))
    return f"{names}{nearest(unknown[0], [*columns, *given])}; there are {', '.join(sorted(columns)) or 'none'}"
