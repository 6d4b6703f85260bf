"""The calls of a session: their JSON, and the branches of tokens that they produce for training.

The JSON is that of the OpenAI API, and of vLLM's tokens-in-tokens-out route, which verifiers and renderers use.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.errors import UserError
from torchtitan.inference.types import Branch, Completion, Given, SamplingParameters, add_turn
from torchtitan.rollout.tokenizer import ChatRenderer, Messages, Tokenizer, plain_message
from torchtitan.rollout.tool_calls import parse_tool_calls

# Options that would change the answer but are not supported; a call with any value other than these is refused.
ONLY: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "tool_choice": (None, "auto", "none"),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "functions": (None, []),
    "best_of": (None, 1),
    "echo": (None, False),
    "top_logprobs": (None, 0),
    # Options of vLLM and SGLang
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "structured_outputs": (None,),
    **{f"guided_{what}": (None,) for what in ("json", "regex", "choice", "grammar")},
}


class WrongCall(Exception):
    """An error by the program. `code` is OpenAI's error code, if there is one."""

    def __init__(self, message: str, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.code, self.status = code, status


@dataclass(frozen=True)
class ChatCall:
    """A call of /v1/chat/completions. Temperature and similar options are the run's, whatever the program sends."""

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
    """Parse a chat call. Raises WrongCall."""
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
        _max_tokens(data.get("max_tokens") if (most := data.get("max_completion_tokens")) is None else most),
        _stop_ids(data, tokenizer),
        bool(data.get("logprobs")),
        bool(data.get("stream")),
        isinstance(options, dict) and bool(options.get("include_usage")),
    )


def parse_tokens(data: Mapping[str, Any], tokenizer: Tokenizer) -> TokenCall:
    """Parse a token call. Raises WrongCall. Options specific to vLLM (cache_salt, routed experts, ...) are ignored."""
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
            raise WrongCall(
                f"{name} = {json.dumps(data[name])} is not supported: one unconstrained answer is sampled after the "
                "messages as the run's chat template renders them"
            )


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
    """Return the tokens that end the answer: stop_token_ids, and stop texts of one token each."""
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


def to_message(
    completion: Completion, tokenizer: Tokenizer, tools: bool, name: str, stops: Sequence[int] = ()
) -> dict[str, Any]:
    """Return the policy's message, without the program's stop token. A truncated answer has no tool calls."""
    stopped = completion.finish_reason == "stop" and completion.token_ids[-1] in stops
    text = tokenizer.decode(completion.token_ids[:-1] if stopped else completion.token_ids)
    calls: list[dict[str, Any]] = []
    if tools and completion.finish_reason == "stop":
        try:
            text, found = parse_tool_calls(text)
        except ValueError:
            found = []  # treat all of it as text
        calls = [
            {
                # Mistral's templates accept only ids of nine characters.
                "id": hashlib.blake2b(f"{name}-{number}".encode()).hexdigest()[:9],
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
    """Return a chat completion as JSON. about: id, created, model."""
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
    """Yield a chat completion as server-sent events; it was sampled as a whole and is only framed as a stream."""

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
    """Return the text and log-prob of each token in OpenAI's format."""
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
    """Return vLLM's answer. Each entry names its token as vLLM did up to 0.31, for renderers, and as it does since."""
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
    """A conversation up to and including an answer of the policy."""

    messages: list[Canonical]
    tools: str
    token_ids: list[int]


@dataclass
class Session:
    """The calls of one session.

    `failed` has hashes of the prompts that the system could not answer and has not answered since. An episode that
    had to continue without an answer says nothing about the policy.
    """

    name: str
    sampling: SamplingParameters
    """For every call; a call derives its seed from this one and may ask for fewer tokens"""
    longest: int
    """Maximum tokens of a branch, prompt and completion together"""
    min_version: int = 0
    shares: str = ""
    """See InferencePool.generate"""
    calls: int = 0
    failed: set[int] = field(default_factory=set)
    cut: bool = False
    """Whether a limit truncated the last answer, or left no room for one"""
    branches: list[Branch] = field(default_factory=list)
    _turns: list[_Turn] = field(default_factory=list)

    def prompt(self, renderer: ChatRenderer, messages: Messages, tools: Messages) -> list[int]:
        """Return the tokens of a conversation: those of the longest known conversation that it continues, then those of
        its new messages. If it continues none, or its history was rewritten, all of it is rendered. Raises UserError if
        the template refuses it."""
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
                continue  # written by the program: how the template renders it depends on the other messages
            try:
                return turn.token_ids + renderer.following(turn.token_ids, new, tools)
            except UserError:
                break  # the template does not render the new messages separately
        return renderer.whole(messages, tools)

    def record(self, prompt_ids: list[int], completion: Completion) -> None:
        """Record the answer to a call."""
        extended = add_turn(self.branches, prompt_ids, completion)
        # The branch that ended last is the last in the list.
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
        """Remember the tokens of the conversation `messages` with the policy's answer."""
        canonical = [canonical_message(message) for message in (*messages, said)]
        self._turns.append(_Turn(canonical, _canonical_tools(tools), prompt_ids + completion.token_ids))

    def branches_to_json(self) -> list[list[Any]]:
        """Return the branches in the form that `branches_from_json` reads."""
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
    """Return what identifies a plain message even if a program reformatted it: role, text, calls, call id and name."""
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
