"""Functions as tools: what the policy is told about them, and calls with arguments that it has made up."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pydantic

from torchtitan.errors import UserError

ARGUMENTS = re.compile(r"^(?:Args|Arguments|Parameters):\s*$", re.MULTILINE)
# An argument in a docstring of Google's style: `    name (type): what it is`.
ARGUMENT = re.compile(r"^\s+(?P<name>\w+)\s*(?:\([^)]*\))?:\s*(?P<text>.+)$")


@dataclass
class Tool:
    """A function that the policy may call."""

    function: Callable[..., Any]
    name: str
    arguments: type[pydantic.BaseModel]
    """Its parameters as a model: checks what comes, and describes them"""
    description: str

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates and OpenAI's API take it."""
        parameters = {key: value for key, value in self.arguments.model_json_schema().items() if key != "title"}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def check(self, arguments: Any) -> dict[str, Any]:
        """The arguments of a call, converted to the annotated types. Raises ValueError in words for the policy."""
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments of {self.name} must be an object")
        try:
            checked = self.arguments.model_validate(arguments)
        except pydantic.ValidationError as error:
            problems = [f"{'.'.join(map(str, one['loc'])) or self.name}: {one['msg']}" for one in error.errors()]
            raise ValueError("; ".join(problems)) from None
        return {name: getattr(checked, name) for name in type(checked).model_fields}


def make_tool(function: Callable[..., Any], method: bool = False) -> Tool:
    """The tool of a function; of a method, whose first parameter is left out.

    Raises:
        UserError: it has no docstring, or a parameter without a type or that cannot be described.
    """
    name = function.__name__
    description, *described = ARGUMENTS.split(inspect.getdoc(function) or "", maxsplit=1)
    if not description.strip():
        raise UserError(f"tool {name}: it needs a docstring, from which the policy learns what it does")
    lines = map(ARGUMENT.match, "".join(described).splitlines())
    meanings = {found["name"]: found["text"] for found in lines if found}
    hints = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[int(method) :]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise UserError(f"tool {name}: parameter {parameter.name} cannot be given by its name")
        if parameter.name not in hints:
            raise UserError(f"tool {name}: parameter {parameter.name} needs a type annotation")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (
            hints[parameter.name],
            pydantic.Field(default, description=meanings.get(parameter.name)),
        )
    try:
        model = pydantic.create_model(name, __config__=pydantic.ConfigDict(extra="forbid"), **fields)
        tool = Tool(function, name, model, description.strip())
        json.dumps(tool.schema)
    except (pydantic.PydanticUserError, pydantic.errors.PydanticInvalidForJsonSchema, NameError, TypeError) as error:
        raise UserError(f"tool {name}: its parameters cannot be described ({error})") from error
    return tool


def public_methods(kind: Any) -> list[Callable[..., Any]]:
    """The methods of a class that are tools: all public ones but reset and get_reward, in the order of definition."""
    found = {name: value for base in reversed(kind.__mro__[:-1]) for name, value in vars(base).items()}
    names = [name for name in found if not name.startswith("_") and name not in ("reset", "get_reward")]
    return [getattr(kind, name) for name in names if inspect.isfunction(getattr(kind, name))]
