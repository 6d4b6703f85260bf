"""The calls of a session: their JSON, and the branches of tokens that they leave for training.

The JSON is that of the OpenAI API, and of vLLM's tokens-in-tokens-out route as verifiers and renderers speak it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.errors import UserError
from torchtitan.inference.types import Branch, Completion, Given, SamplingParameters, add_turn
from torchtitan.rollout.tokenizer import ChatRenderer, Messages, Tokenizer, plain_message
from torchtitan.rollout.tool_calls import parse_tool_calls

# Options that would change the answer and cannot be followed here; with any other value than these, a call is refused.
ONLY: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "tool_choice": (None, "auto", "none"),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "functions": (None, []),
    "best_of": (None, 1),
    "echo": (None, False),
}


class WrongCall(Exception):
    """The program's own mistake. `code` is OpenAI's name for it, where that has one."""

    def __init__(self, message: str, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.code, self.status = code, status


@dataclass(frozen=True)
class ChatCall:
    """A call of /v1/chat/completions. Temperature and its kin are the run's, whatever the program asks for."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    max_tokens: int | None
    stop_token_ids: list[int]
    log_probs: bool
    stream: bool
    usage_in_stream: bool


@dataclass(frozen=True)
class TokenCall:
    """A call of /inference/v1/generate."""

    token_ids: list[int]
    max_tokens: int | None
    stop_token_ids: list[int]


def parse_chat(data: Mapping[str, Any], tokenizer: Tokenizer) -> ChatCall:
    """Raises WrongCall."""
    _refuse_unsupported(data)
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise WrongCall("messages must be a non-empty list")
    tools = data.get("tools") if data.get("tool_choice") != "none" else None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(one, dict) for one in tools)):
        raise WrongCall("tools must be a list of objects")
    options = data.get("stream_options") or {}
    try:
        messages = [plain_message(message) for message in messages]
    except ValueError as error:
        raise WrongCall(str(error)) from None
    return ChatCall(
        messages,
        tools or [],
        _max_tokens(data.get("max_completion_tokens", data.get("max_tokens"))),
        _stop_ids(data, tokenizer),
        bool(data.get("logprobs")),
        bool(data.get("stream")),
        isinstance(options, dict) and bool(options.get("include_usage")),
    )


def parse_tokens(data: Mapping[str, Any], tokenizer: Tokenizer) -> TokenCall:
    """Raises WrongCall. What belongs to vLLM alone (cache_salt, routed experts, ...) has no meaning here."""
    sampling = data.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise WrongCall("sampling_params must be an object")
    if not (token_ids := _token_ids(data, "token_ids", tokenizer)):
        raise WrongCall("token_ids must not be empty")
    _refuse_unsupported(sampling)
    return TokenCall(token_ids, _max_tokens(sampling.get("max_tokens")), _stop_ids(sampling, tokenizer))


def _refuse_unsupported(data: Mapping[str, Any]) -> None:
    for name, values in ONLY.items():
        if data.get(name) not in values:
            raise WrongCall(f"{name} = {json.dumps(data[name])} is not supported: one answer is sampled, freely")


def _max_tokens(value: Any) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise WrongCall(f"the number of tokens must be at least 1, got {value!r}")
    return value


def _token_ids(data: Mapping[str, Any], name: str, tokenizer: Tokenizer) -> list[int]:
    ids = data.get(name) or []
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < tokenizer.vocab_size for one in ids):
        raise WrongCall(f"{name} must be a list of integers in 0..{tokenizer.vocab_size - 1}")
    return ids


def _stop_ids(data: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Tokens that end the answer: those that are named, and texts that are one token each."""
    stop, found = data.get("stop") or [], _token_ids(data, "stop_token_ids", tokenizer)
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(one, str) for one in stop):
        raise WrongCall("stop must be text or a list of texts")
    for text in stop:
        ids = tokenizer.encode(text)
        if len(ids) != 1:
            raise WrongCall(f"stop {text!r} is {len(ids)} tokens: only single tokens can end an answer here")
        found = [*found, *ids]
    return found


def said(
    completion: Completion, tokenizer: Tokenizer, tools: bool, name: str, stops: Sequence[int] = ()
) -> dict[str, Any]:
    """The policy's message, without what the program has named to end it. An answer that was cut off calls no tool."""
    stopped = completion.finish_reason == "stop" and completion.token_ids[-1] in stops
    text = tokenizer.decode(completion.token_ids[:-1] if stopped else completion.token_ids)
    calls: list[dict[str, Any]] = []
    if tools and completion.finish_reason == "stop":
        try:
            text, found = parse_tool_calls(text)
        except ValueError:
            found = []  # it is all text
        calls = [
            {
                "id": f"call_{name}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for number, call in enumerate(found)
        ]
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    return {**message, "tool_calls": calls} if calls else message


def chat_answer(
    about: Mapping[str, Any],
    message: Mapping[str, Any],
    completion: Completion,
    prompt_tokens: int,
    log_probs: list[Any] | None,
) -> dict[str, Any]:
    """A chat completion. about: id, created, model."""
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": _finish(message, completion),
        "logprobs": None if log_probs is None else {"content": log_probs, "refusal": None},
    }
    usage = _usage(prompt_tokens, completion)
    return {**about, "object": "chat.completion", "choices": [choice], "usage": usage}


def chat_frames(
    about: Mapping[str, Any],
    message: Mapping[str, Any],
    completion: Completion,
    prompt_tokens: int,
    log_probs: list[Any] | None,
    usage: bool,
) -> Iterator[bytes]:
    """The same as server-sent events: it was sampled whole, and comes in the frames of a stream."""

    def frame(delta: Mapping[str, Any], **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None, **more}
        return _event({**about, "object": "chat.completion.chunk", "choices": [choice]})

    scored = None if log_probs is None else {"content": log_probs, "refusal": None}
    yield frame({"role": "assistant", "content": message["content"] or ""}, logprobs=scored)
    for number, call in enumerate(message.get("tool_calls", ())):
        yield frame({"tool_calls": [{"index": number, **call}]})
    yield frame({}, finish_reason=_finish(message, completion))
    if usage:
        yield _event(
            {**about, "object": "chat.completion.chunk", "choices": [], "usage": _usage(prompt_tokens, completion)}
        )
    yield b"data: [DONE]\n\n"


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def _finish(message: Mapping[str, Any], completion: Completion) -> str:
    return "tool_calls" if message.get("tool_calls") else completion.finish_reason


def _usage(prompt_tokens: int, completion: Completion) -> dict[str, int]:
    generated = len(completion.token_ids)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
    }


def log_prob_entries(completion: Completion, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """OpenAI's form: text and log-prob of each token."""
    return [
        {
            "token": (text := tokenizer.decode([token], skip_special=False)),
            "logprob": log_prob,
            "bytes": list(text.encode()),
            "top_logprobs": [],
        }
        for token, log_prob in zip(completion.token_ids, completion.log_probs, strict=True)
    ]


def tokens_answer(name: str, completion: Completion) -> dict[str, Any]:
    """vLLM's answer. An entry names its token as vLLM did up to 0.31, which renderers read, and as it does since."""
    entries: Sequence[dict[str, Any]] = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": log_prob, "rank": None}
        for token, log_prob in zip(completion.token_ids, completion.log_probs, strict=True)
    ]
    choice = {
        "index": 0,
        "finish_reason": completion.finish_reason,
        "token_ids": completion.token_ids,
        "logprobs": {"content": entries},
        "weight_versions": [vars(span) for span in completion.spans],
    }
    return {"request_id": name, "choices": [choice]}


Canonical = tuple[Any, ...]


@dataclass
class _Turn:
    """A conversation up to an answer of the policy."""

    messages: list[Canonical]
    tools: str
    token_ids: list[int]


@dataclass
class Session:
    """One episode's calls.

    `failed` holds the prompts of calls that the system could not answer, and has not answered since: how an episode
    went that had to go on without an answer says nothing of the policy.
    """

    name: str
    sampling: SamplingParameters
    """Of every call: a call derives its seed from this one, and may ask for fewer tokens"""
    longest: int
    """Tokens of a branch, prompt and completion"""
    min_version: int = 0
    shares: str = ""
    """See InferencePool.generate"""
    calls: int = 0
    failed: set[int] = field(default_factory=set)
    cut: bool = False
    """Whether a limit ended the last answer, or left no room for one"""
    branches: list[Branch] = field(default_factory=list)
    _turns: list[_Turn] = field(default_factory=list)

    def prompt(self, renderer: ChatRenderer, messages: Messages, tools: Messages) -> list[int]:
        """Tokens of a conversation: those of the longest one that it goes on from, and its new messages; where it goes
        on from none, or its history was rewritten, all of it anew. Raises UserError where the template refuses it."""
        canonical = [canonical_message(message) for message in messages]
        known = [
            turn
            for turn in self._turns
            if turn.tools == _canonical_tools(tools)
            and len(turn.messages) < len(canonical)
            and canonical[: len(turn.messages)] == turn.messages
        ]
        for turn in sorted(known, key=lambda turn: len(turn.messages), reverse=True):
            new = messages[len(turn.messages) :]
            if any(message.get("role") == "assistant" for message in new):
                continue  # the program wrote it: what the template makes of it depends on the rest
            try:
                return turn.token_ids + renderer.following(turn.token_ids, new, tools)
            except UserError:
                break  # the template does not show them alone
        return renderer.whole(messages, tools)

    def record(self, prompt_ids: list[int], completion: Completion) -> None:
        """A call has been answered with this."""
        extended = add_turn(self.branches, prompt_ids, completion)
        # The one that ended last stands last.
        self.branches = [*(one for one in self.branches if one is not extended), extended]
        self.cut = completion.finish_reason == "length"
        self.failed.discard(hash(tuple(prompt_ids)))

    def remember(
        self,
        messages: Messages,
        tools: Messages,
        said: Mapping[str, Any],
        prompt_ids: list[int],
        completion: Completion,
    ) -> None:
        """The conversation `messages`, with what the policy said then, is these tokens."""
        canonical = [canonical_message(message) for message in (*messages, said)]
        self._turns.append(_Turn(canonical, _canonical_tools(tools), prompt_ids + completion.token_ids))

    def branches_to_json(self) -> list[list[Any]]:
        """For `branches_from_json`."""
        return [
            [one.token_ids if isinstance(one, Given) else one.to_json() for one in branch.segments]
            for branch in self.branches
        ]


def branches_from_json(data: Sequence[Sequence[Any]]) -> list[Branch]:
    return [
        Branch([Given(one) if isinstance(one, list) else Completion.from_json(one) for one in branch])
        for branch in data
    ]


def canonical_message(message: Mapping[str, Any]) -> Canonical:
    """What makes a plain message the same one, whatever a program has done to its form: role, text, calls."""
    calls = tuple(
        (one["function"].get("name"), _canonical_json(one["function"].get("arguments")))
        for one in message.get("tool_calls") or ()
        if isinstance(one, dict) and isinstance(one.get("function"), dict)
    )
    return message.get("role"), message.get("content") or "", calls, message.get("tool_call_id"), message.get("name")


def _canonical_tools(tools: Messages) -> str:
    return json.dumps(tools, sort_keys=True) if tools else ""


def _canonical_json(arguments: Any) -> str:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return arguments
    return json.dumps(arguments, sort_keys=True)
