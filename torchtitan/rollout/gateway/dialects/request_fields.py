"""The fields of requests that several APIs share, and how they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import Field

from torchtitan.inference.types import Body
from torchtitan.rollout.gateway.calls import WrongCall
from torchtitan.rollout.gateway.dialects.freeform import as_function, is_freeform

# Options that would change the answer but are not supported; a call with any value other than these is refused.
ONLY: dict[str, tuple[Any, ...]] = {
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "functions": (None, []),
    "best_of": (None, 1),
    "echo": (None, False),
    "top_logprobs": (None, 0),
    # Options of vLLM and SGLang
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "structured_outputs": (None,),
    **{f"guided_{what}": (None,) for what in ("json", "regex", "choice", "grammar")},
}
# As many answers to one call as the OpenAI API allows.
MAX_ANSWERS = 128

Positive = Annotated[int, Field(ge=1)]
TokenIds = list[Annotated[int, Field(ge=0)]]
Request = TypeVar("Request", bound="ToolsBody")


class ToolsBody(Body):
    """The part of a request that all APIs share."""

    tools: list[dict[str, Any]] | None = None
    parallel_tool_calls: bool | None = None


class SamplingBody(Body):
    """The sampling options that vLLM shares with OpenAI's chat completions."""

    max_tokens: Positive | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    stop: str | list[Annotated[str, Field(min_length=1)]] | None = None
    stop_token_ids: TokenIds | None = None

    @property
    def limits(self) -> dict[str, Any]:
        """What ends an answer, as fields of a Call."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        texts = [text for text in stop or () if text]
        return {"max_tokens": self.max_tokens, "stop": texts, "stop_token_ids": self.stop_token_ids or []}


def refuse_unsupported(data: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]] = ONLY) -> None:
    """Raise WrongCall for an option whose value is not among the given ones."""
    for name, values in only.items():
        if data.get(name) not in values:
            raise WrongCall(
                f"{name} = {json.dumps(data[name])} is not supported: unconstrained answers are sampled after the "
                "messages as the run's chat template renders them"
            )


def read_request(
    data: Mapping[str, Any], kind: type[Request], only: Mapping[str, tuple[Any, ...]], parameters: str
) -> tuple[Request, list[dict[str, Any]], int]:
    """Return (the request, its functions as chat templates expect them, the number of tools that run at a provider).

    only: see refuse_unsupported. parameters: the API's name for a function's schema. Raises WrongCall.
    """
    refuse_unsupported(data, only)
    request = kind.read(dict(data), WrongCall)
    tools = request.tools or []
    kinds = (None, "custom", "function")
    served = [tool for tool in tools if tool.get("type") in kinds and tool.get("format") in (None, {"type": "text"})]
    functions: list[dict[str, Any]] = []
    for tool in served:
        if not isinstance(tool.get("name"), str):
            raise WrongCall(f"a tool needs a name: {tool!r:.200}")
        function = {
            "name": tool["name"],
            "description": tool.get("description") or "",
            "parameters": tool.get(parameters) or {},
        }
        if parameters == "parameters" and is_freeform(tool, tool):
            function = as_function(tool)
        functions.append({"type": "function", "function": function})
    return request, functions, len(tools) - len(served)


def read_tool_choice(tools: list[dict[str, Any]], choice: Any) -> tuple[list[dict[str, Any]], str | None]:
    """Return (the tools that the policy sees, Call.must_call) of OpenAI's `tool_choice`. Raises WrongCall."""
    if choice in (None, "auto", "none"):
        return [] if choice == "none" else tools, None
    kind = choice.get("type") if isinstance(choice, dict) else None
    function = choice.get(kind, choice) if isinstance(choice, dict) else {"name": ""}
    name = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and kind not in ("function", "custom"):
        raise WrongCall("tool_choice must be auto, none, required or a function")
    names = [tool["function"].get("name") for tool in tools if isinstance(tool.get("function"), dict)]
    if name == "":  # any function will do
        is_known = bool(names)
    else:
        is_known = name in names
    if not is_known:
        raise WrongCall(f"tool_choice {name or choice!r} is not among the tools")
    return tools, name
