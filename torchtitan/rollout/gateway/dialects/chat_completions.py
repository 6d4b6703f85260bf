"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field

from torchtitan.rollout.gateway.calls import Answer, Call, Choice, WrongCall
from torchtitan.rollout.gateway.conversation_reader import ConversationReader
from torchtitan.rollout.gateway.dialects.dialect import Dialect, compact_json
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
        tools, must_call = read_tool_choice([_shown(one) for one in request.tools or ()], data.get("tool_choice"))
        conversation = ConversationReader()
        for message in request.messages:
            conversation.add_message(message)
        call = Call(
            messages=conversation.messages(),
            header=conversation.header,
            tools=tools,
            n=request.n or 1,
            must_call=must_call,
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
                "message": choice.message,
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
            for number, one in enumerate(choice.calls):
                yield _chunk(answer, index, {"tool_calls": [{"index": number, **one}]})
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
