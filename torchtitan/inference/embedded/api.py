"""JSON bodies of the engine's HTTP routes, checked and translated."""

from __future__ import annotations

import json
from typing import Any

from torchtitan.inference.embedded.requests import InvalidRequest
from torchtitan.inference.types import Completion, GenerateRequest, SamplingParameters

_SAMPLING = set(SamplingParameters.__dataclass_fields__)
# What OpenAI's route takes beside the sampling parameters and has no meaning here unless it is at its default.
_NEUTRAL: dict[str, tuple[Any, ...]] = {"stream": (False, None), "echo": (False, None), "best_of": (None,)}
_IGNORED = {"model", "user", "logprobs"}


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises InvalidRequest."""
    try:
        data = json.loads(body)
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidRequest("the body must be a JSON object")
    return data


def _check_keys(where: str, given: set[str], required: set[str], allowed: set[str]) -> None:
    if missing := sorted(required - given):
        raise InvalidRequest(f"{where} lacks {', '.join(missing)}")
    if unknown := sorted(given - allowed):
        raise InvalidRequest(f"{where} has unknown {', '.join(unknown)}; known: {', '.join(sorted(allowed))}")


def parse_generate(data: dict[str, Any]) -> GenerateRequest:
    """A GenerateRequest in its own JSON form. Raises InvalidRequest; values are checked by the engine."""
    _check_keys(
        "the body", set(data), {"request_id", "prompt_ids", "sampling"}, {"request_id", "prompt_ids", "sampling"}
    )
    if not isinstance(data["sampling"], dict):
        raise InvalidRequest("sampling must be an object")
    _check_keys("sampling", set(data["sampling"]), {"max_tokens"}, _SAMPLING)
    return GenerateRequest.from_json(data)


def parse_score(data: dict[str, Any]) -> list[int]:
    """The token ids of a score request: at least two. Raises InvalidRequest; ids are checked by the engine's limits."""
    _check_keys("the body", set(data), {"token_ids"}, {"token_ids"})
    token_ids = data["token_ids"]
    if not isinstance(token_ids, list) or len(token_ids) < 2:
        raise InvalidRequest("token_ids must be a list of at least two token ids")
    return token_ids


def parse_completions(data: dict[str, Any]) -> GenerateRequest:
    """An OpenAI-like completions request whose prompt is a list of token ids. Raises InvalidRequest."""
    _check_keys("the body", set(data), {"prompt"}, {"prompt", *_SAMPLING, *_NEUTRAL, *_IGNORED})
    for name, values in _NEUTRAL.items():
        if data.get(name) not in values:
            raise InvalidRequest(f"{name} = {data[name]!r} is not supported")
    prompt = data["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    if not isinstance(prompt, list):
        raise InvalidRequest("prompt must be a list of token ids: this server takes and gives tokens, not text")
    sampling = {name: data[name] for name in _SAMPLING & set(data)}
    return GenerateRequest("completion", prompt, SamplingParameters(**{"max_tokens": 16, **sampling}))


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
