"""What a program asks for and what it gets, whatever API it speaks, and the tokens-in-tokens-out route of vLLM.

A dialect translates an API's JSON to a Call and an Answer's messages to that JSON, and does nothing else: what is
rendered, sampled and recorded is the same for all of them.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import Field

from torchtitan.inference.types import Body, Completion
from torchtitan.rollout.conversation.messages import plain_message
from torchtitan.rollout.conversation.tokenizer import Tokenizer
from torchtitan.rollout.conversation.tool_formats.format import ToolCall
from torchtitan.rollout.conversation.tool_formats.registry import DEFAULT
from torchtitan.rollout.conversation.turns import reader_of

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


class WrongCall(Exception):
    """An error by the program. `code` is OpenAI's error code, if there is one."""

    def __init__(self, message: str, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.code, self.status = code, status


@dataclass(frozen=True)
class Call:
    """A call for the next turn of a conversation. Temperature and similar options are the run's, whatever the program
    sends."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """As chat templates expect them"""
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    n: int = 1
    must_call: str | None = None
    """The tool that the answer should call, "" for any; nothing forces the policy to"""
    tools_left_out: int = 0
    """Number of the program's tools that the policy does not see, because they would run at a provider"""
    template_values: dict[str, Any] = field(default_factory=dict)
    log_probs: bool = False
    stream: bool = False
    usage_in_stream: bool = False
    preamble: int = 0
    """Number of first messages that do not belong to the conversation, which a later call may name and continue"""
    token_ids: list[int] = field(default_factory=list)
    """In place of messages, from a program that renders them itself"""


@dataclass(frozen=True)
class Choice:
    """One answer of the policy."""

    message: dict[str, Any]
    """The assistant's message in the form of chat completions"""
    completion: Completion
    stopped_by: str | None = None
    """The program's stop text that ended it"""
    log_probs: list[dict[str, Any]] | None = None

    @property
    def calls(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.message.get("tool_calls", [])
        return found

    @property
    def finish(self) -> str:
        return "tool_calls" if self.calls else self.completion.finish_reason


@dataclass(frozen=True)
class Answer:
    """The answers to one call."""

    name: str
    model: str
    created: int
    prompt_tokens: int
    choices: list[Choice]

    @property
    def generated(self) -> int:
        """Number of sampled tokens"""
        return sum(len(choice.completion.token_ids) for choice in self.choices)


class Dialect(ABC):
    """An API. All methods are pure translations."""

    path: str

    @abstractmethod
    def read(self, data: Mapping[str, Any], recall: Callable[[str], list[dict[str, Any]]]) -> Call:
        """Read a call. `recall` returns the conversation that ended with an answer of this session, by the answer's
        name. Raises WrongCall."""

    @abstractmethod
    def write(self, call: Call, answer: Answer) -> dict[str, Any]:
        """Return an answer as JSON."""

    @abstractmethod
    def events(self, call: Call, answer: Answer) -> Iterator[dict[str, Any]]:
        """Yield an answer as the events of a stream. (It was sampled as a whole and is only framed as a stream.)"""

    def frames(self, call: Call, answer: Answer) -> Iterator[bytes]:
        """Yield the events as server-sent events."""
        for event in self.events(call, answer):
            yield b"event: %b\ndata: %b\n\n" % (event["type"].encode(), compact_json(event))

    def error(self, message: str, status: int, code: str | None) -> dict[str, Any]:
        """Return an error as JSON, in OpenAI's format."""
        kind = "server_error" if status >= 500 else "invalid_request_error"
        return {"error": {"message": message, "type": kind, "code": code, "param": None}}


class ToolsBody(Body):
    """The part of a request that all APIs share."""

    tools: list[dict[str, Any]] | None = None


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
        kept = [one for one in stop or () if one]
        return {"max_tokens": self.max_tokens, "stop": kept, "stop_token_ids": self.stop_token_ids or []}


class TokensBody(Body):
    """A request to /inference/v1/generate. Options specific to vLLM (cache_salt, routed experts, ...) are ignored."""

    token_ids: TokenIds = Field(min_length=1)
    sampling_params: SamplingBody | None = None


def parse_tokens(data: Mapping[str, Any]) -> Call:
    """Parse a request to /inference/v1/generate. Raises WrongCall."""
    request = TokensBody.read(dict(data), WrongCall)
    sampling = request.sampling_params or SamplingBody()
    if sampling.n not in (None, 1):
        raise WrongCall("n must be 1")
    refuse_unsupported(data.get("sampling_params") or {})
    return Call(token_ids=request.token_ids, **sampling.limits)


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
    own = [one for one in tools if one.get("type") in (None, "custom", "function") and "format" not in one]
    if wrong := [one for one in own if not isinstance(one.get("name"), str)]:
        raise WrongCall(f"a tool needs a name: {wrong[0]!r:.200}")
    functions = [
        {"name": one["name"], "description": one.get("description") or "", "parameters": one.get(parameters) or {}}
        for one in own
    ]
    return request, [{"type": "function", "function": one} for one in functions], len(tools) - len(own)


def read_tool_choice(tools: list[dict[str, Any]], choice: Any) -> tuple[list[dict[str, Any]], str | None]:
    """Return (the tools that the policy sees, Call.must_call) of OpenAI's `tool_choice`. Raises WrongCall."""
    if choice in (None, "auto", "none"):
        return [] if choice == "none" else tools, None
    function = choice.get("function", choice) if isinstance(choice, dict) else {"name": ""}
    name = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and not (isinstance(choice, dict) and choice.get("type") == "function"):
        raise WrongCall("tool_choice must be auto, none, required or a function")
    names = [one["function"].get("name") for one in tools if isinstance(one.get("function"), dict)]
    if name not in (names if name != "" else ["" for _ in names]):
        raise WrongCall(f"tool_choice {name or choice!r} is not among the tools")
    return tools, name


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Return messages as chat templates expect them. Raises WrongCall if that is impossible."""
    if not isinstance(messages, list) or not messages:
        raise WrongCall("messages must be a non-empty list")
    try:
        return [plain_message(message) for message in messages]
    except ValueError as error:
        raise WrongCall(str(error)) from None


def stop_ids(call: Call, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens at which an engine can end the answer: stop_token_ids, and stop texts of one token each.

    Raises WrongCall for a token that does not exist.
    """
    given = [*call.token_ids, *call.stop_token_ids]
    size = tokenizer.vocab_size
    if wrong := [one for one in given if one >= size]:
        raise WrongCall(f"stop_token_ids or token_ids: {wrong[0]} is not in 0..{size - 1}")
    encoded = [tokenizer.encode(text) for text in call.stop]
    return list(dict.fromkeys([*call.stop_token_ids, *(ids[0] for ids in encoded if len(ids) == 1)]))


def cut_at_stop(completion: Completion, stops: Sequence[str], tokenizer: Tokenizer) -> Completion:
    """Return a completion up to the first token with which its text contains one of `stops`.

    Each token was sampled given those before it, so the rest of them can be dropped like what was never sampled.
    """

    def stopped(tokens: int) -> bool:
        text = tokenizer.decode(completion.token_ids[:tokens])
        return any(stop in text for stop in stops)

    length = len(completion.token_ids)
    if not stops or not stopped(length):
        return completion
    return completion.first(bisect.bisect_left(range(length), True, key=stopped))


def make_choice(
    completion: Completion,
    call: Call,
    tokenizer: Tokenizer,
    name: str,
    tool_format: str = DEFAULT,
    prompt_ids: Sequence[int] = (),
) -> Choice:
    """Return the policy's answer to a prompt, without the program's stop text or token.

    Its text is what `Turn.shown` says. Calls are those outside of thoughts that can be read; others stay text. A
    truncated answer has no calls.
    """
    ids = completion.token_ids
    ended = completion.finish_reason == "stop"
    if ended and ids[-1] in call.stop_token_ids:
        ids = ids[:-1]
    # Without tools, and where the answer was cut off, nothing is a call.
    turns = reader_of(tokenizer, tool_format if ended and call.tools else "")
    marked, text = turns.marked(ids), tokenizer.decode(ids)
    stopped_by = min((stop for stop in call.stop if stop in text), key=text.find, default=None)
    if stopped_by is not None:
        marked = marked.partition(stopped_by)[0]
    turn = turns.read_marked(turns.opened(prompt_ids), marked, call.tools)
    calls = [
        {
            # Mistral's templates accept only ids of nine characters.
            "id": hashlib.blake2b(f"{name}-{number}".encode()).hexdigest()[:9],
            "type": "function",
            "function": {"name": one.name, "arguments": json.dumps(one.arguments, ensure_ascii=False)},
        }
        for number, one in enumerate(one for one in turn.calls if isinstance(one, ToolCall))
    ]
    text = turn.shown(turns.hidden)
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    message |= {"tool_calls": calls} if calls else {}
    log_probs = log_prob_entries(completion, tokenizer) if call.log_probs else None
    return Choice(message, completion, stopped_by, log_probs)


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


def compact_json(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()
