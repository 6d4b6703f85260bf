"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field

from torchtitan.rollout.gateway.calls import Answer, Call, Choice, WrongCall
from torchtitan.rollout.gateway.conversation_reader import ConversationReader
from torchtitan.rollout.gateway.dialects.dialect import Dialect, compact_json
from torchtitan.rollout.gateway.dialects.freeform import TEXT, as_function, is_freeform, text_of
from torchtitan.rollout.gateway.dialects.request_fields import (
    Positive,
    SamplingBody,
    ToolsBody,
    read_tool_choice,
    refuse_unsupported,
)

# Keys of a function that say nothing to the policy.
UNSEEN = ("strict", "cache_control")


class _Request(ToolsBody, SamplingBody):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: Positive | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None


class ChatCompletions(Dialect):
    """POST /v1/chat/completions, with some of the options of vLLM and SGLang."""

    path = "/v1/chat/completions"
    last_frame = b"data: [DONE]\n\n"

    def read(self, data: Mapping[str, Any], recall: Callable[[str], list[dict[str, Any]]]) -> Call:
        refuse_unsupported(data)
        request = _Request.read(dict(data), WrongCall)
        freeform, shown = set[str](), []
        for tool in request.tools or ():
            custom = tool.get("custom")
            if tool.get("type") != "custom" or not isinstance(custom, dict):
                shown.append(_shown(tool))
            elif is_freeform(tool, custom):
                shown.append({"type": "function", "function": as_function(custom)})
                freeform.add(str(custom.get("name")))
        tools, must_call = read_tool_choice(shown, data.get("tool_choice"))
        conversation = ConversationReader()
        for message in request.messages:
            conversation.add_message(_with_functions(message))
        call = Call(
            messages=conversation.messages(),
            header=conversation.header,
            tools=tools,
            n=request.n or 1,
            must_call=must_call,
            parallel_calls=request.parallel_tool_calls is not False,
            freeform=frozenset(freeform),
            tools_left_out=len(request.tools or ()) - len(shown),
            template_values=request.chat_template_kwargs or {},
            log_probs=bool(data.get("logprobs")),
            stream=bool(data.get("stream")),
            usage_in_stream=bool((request.stream_options or {}).get("include_usage")),
            **request.limits,
        )
        return replace(call, max_tokens=request.max_completion_tokens or call.max_tokens)

    def write(self, call: Call, answer: Answer) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": _message(call, choice),
                "finish_reason": choice.finish,
                "logprobs": _log_probs(choice),
            }
            for index, choice in enumerate(answer.choices)
        ]
        return {**_about(answer), "object": "chat.completion", "choices": choices, "usage": _usage(answer)}

    def opening(self, call: Call, answer: Answer) -> Iterator[dict[str, Any]]:
        for index in range(call.n):
            yield _chunk(answer, index, {"role": "assistant", "content": ""})

    def waiting(self, call: Call, answer: Answer) -> Iterator[dict[str, Any]]:
        yield _chunk(answer, 0, {})

    def events(self, call: Call, answer: Answer) -> Iterator[dict[str, Any]]:
        for index, choice in enumerate(answer.choices):
            text = choice.message["content"] or ""
            if text or choice.log_probs:
                yield _chunk(answer, index, {"content": text}, logprobs=_log_probs(choice))
            for number, tool_call in enumerate(_calls(call, choice)):
                yield _chunk(answer, index, {"tool_calls": [{"index": number, **tool_call}]})
            yield _chunk(answer, index, {}, finish_reason=choice.finish)
        if call.usage_in_stream:
            yield {**_about(answer), "object": "chat.completion.chunk", "choices": [], "usage": _usage(answer)}

    def frame(self, event: dict[str, Any], number: int) -> bytes:
        return b"data: " + compact_json(event) + b"\n\n"


def _chunk(answer: Answer, index: int, delta: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None, **more}
    return {**_about(answer), "object": "chat.completion.chunk", "choices": [choice]}


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    """Return what the policy sees of a tool: `strict` and `cache_control` say how to sample and to cache."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    return {"type": "function", "function": {key: value for key, value in function.items() if key not in UNSEEN}}


def _with_functions(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls of freeform tools are calls of the functions that stand for them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    found = []
    for tool_call in calls:
        custom = tool_call.get("custom") if isinstance(tool_call, dict) else None
        if isinstance(custom, dict):
            function = {"name": custom.get("name"), "arguments": {TEXT: custom.get("input")}}
            tool_call = {"id": tool_call.get("id"), "type": "function", "function": function}
        found.append(tool_call)
    return {**message, "tool_calls": found}


def _message(call: Call, choice: Choice) -> dict[str, Any]:
    calls = _calls(call, choice)
    return {**choice.message, "tool_calls": calls} if calls else choice.message


def _calls(call: Call, choice: Choice) -> list[dict[str, Any]]:
    """Return the calls of an answer, those of freeform tools in their form."""
    calls = []
    for tool_call in choice.calls:
        name = tool_call["function"]["name"]
        if name in call.freeform:
            custom = {"name": name, "input": text_of(tool_call["function"]["arguments"])}
            tool_call = {"id": tool_call["id"], "type": "custom", "custom": custom}
        calls.append(tool_call)
    return calls


def _about(answer: Answer) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.name}", "created": answer.created, "model": answer.model}


def _log_probs(choice: Choice) -> dict[str, Any] | None:
    return None if choice.log_probs is None else {"content": choice.log_probs, "refusal": None}


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.generated,
        "total_tokens": answer.prompt_tokens + answer.generated,
    }
