"""Requests to the engine and their answers: the JSON forms, and what makes a request invalid."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field

from torchtitan.errors import UserError
from torchtitan.inference.types import Body, Completion, GenerateRequest, SamplingParameters

# Beyond these bounds logits divided by the temperature overflow, or a request alone fills the memory.
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-4, 1e4
MOST_SAMPLES = 4096
_SAMPLING = set(SamplingParameters.__dataclass_fields__)


class InvalidRequest(UserError):
    """The request cannot be served by any engine with this model: the message says what is wrong."""


class TooLong(InvalidRequest):
    """The request needs more tokens than the engine was started for."""


def _in_bounds(temperature: float) -> float:
    if temperature and not LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE:
        raise ValueError(f"must be 0 (greedy) or lie in {LEAST_TEMPERATURE:g}..{MOST_TEMPERATURE:g}")
    return temperature


class _Strict(Body):
    model_config = ConfigDict(extra="forbid")


class _Sampling(_Strict):
    """SamplingParameters."""

    max_tokens: int = Field(ge=1)
    n: int = Field(1, ge=1, le=MOST_SAMPLES)
    temperature: Annotated[float, AfterValidator(_in_bounds)] = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    stop_token_ids: list[int] = []
    seed: int = 0
    routes: bool = False


class _Generate(_Strict):
    """GenerateRequest."""

    request_id: str
    prompt_ids: list[int] = Field(min_length=1)
    sampling: _Sampling


class _Score(_Strict):
    token_ids: list[int] = Field(min_length=2)


class _Completions(_Sampling):
    """What OpenAI's route takes; of options that have no meaning here the default, or what does no harm."""

    prompt: list[int] = Field(min_length=1)
    max_tokens: int = Field(16, ge=1)
    stream: Literal[False] | None = None
    echo: Literal[False] | None = None
    best_of: None = None
    model: Any = None
    user: Any = None
    logprobs: Any = None


def check_request(request: GenerateRequest, vocab_size: int, max_length: int) -> None:
    """Raise InvalidRequest or TooLong for a request that cannot be served; types are checked too (it may be JSON)."""
    _Generate.read(request.to_json(), InvalidRequest)
    prompt, sampling = request.prompt_ids, request.sampling
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise InvalidRequest(f"prompt_ids must lie in 0..{vocab_size - 1}, got {min(prompt)}..{max(prompt)}")
    needed = len(prompt) + sampling.max_tokens
    if needed > max_length:
        raise TooLong(
            f"prompt of {len(prompt)} tokens + max_tokens {sampling.max_tokens} = {needed} exceeds the engine's "
            f"max_length {max_length}"
        )


def parse_generate(data: dict[str, Any]) -> GenerateRequest:
    """A GenerateRequest in its own JSON form. Raises InvalidRequest."""
    return GenerateRequest.from_json(_Generate.read(data, InvalidRequest).model_dump())


def parse_score(data: dict[str, Any]) -> list[int]:
    """The token ids of a score request: at least two. Raises InvalidRequest; ids are checked by the engine's limits."""
    return _Score.read(data, InvalidRequest).token_ids


def parse_completions(data: dict[str, Any]) -> GenerateRequest:
    """An OpenAI-like completions request whose prompt is a list of token ids. Raises InvalidRequest."""
    prompt = data.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    if not isinstance(prompt, list):
        raise InvalidRequest("prompt must be a list of token ids: this server takes and gives tokens, not text")
    sampling = _Completions.read({**data, "prompt": prompt}, InvalidRequest).model_dump(include=_SAMPLING)
    return GenerateRequest("completion", prompt, SamplingParameters(**sampling))


def completions_answer(model: str, request: GenerateRequest, completions: list[Completion]) -> dict[str, Any]:
    """The OpenAI-like answer; tokens, log-probs, kept tokens and version spans stand in each choice."""
    choices = [
        {
            "index": index,
            "text": "",
            "token_ids": one.token_ids,
            "logprobs": {"token_logprobs": one.log_probs},
            "finish_reason": one.finish_reason,
            "weight_versions": [vars(span) for span in one.spans],
            "kept_token_ids": one.kept_token_ids,
        }
        for index, one in enumerate(completions)
    ]
    generated = sum(len(one.token_ids) for one in completions)
    usage = {"prompt_tokens": len(request.prompt_ids), "completion_tokens": generated}
    return {"object": "text_completion", "model": model, "choices": choices, "usage": usage}
