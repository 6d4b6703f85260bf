"""The tokens-in-tokens-out route of vLLM, /inference/v1/generate, for programs that render messages themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from torchtitan.inference.types import Body, Completion
from torchtitan.rollout.gateway.calls import Call, WrongCall
from torchtitan.rollout.gateway.dialects.request_fields import SamplingBody, TokenIds, refuse_unsupported


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
