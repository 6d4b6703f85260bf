"""How SGLang's /generate is asked for tokens, and how it answers. Pure functions; no torch."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import numpy as np

from torchtitan.inference.agent.client import FINISHED, Call, Malformed, aborted, make_completion, read_spans
from torchtitan.inference.client import RequestRefused
from torchtitan.inference.types import (
    Completion,
    GenerateRequest,
    Routes,
    ScoredTokens,
    VersionSpan,
    check_routes,
    compact,
)

# What SGLang takes for "all tokens".
ALL_TOKENS = -1
# It tells which tokens were kept only where there are at most so many (--sampling-mask-max-tokens); what top-p or min-p
# would keep beyond is cut off too, and told so.
MOST_KEPT = 4096
# Its own parser answers 422 to a body of the wrong form, 400 to values that it cannot use.
REFUSED = (400, 422)


class SGLangDialect:
    """Of versions 0.5.20 to 0.5.23; see agent.client.Dialect."""

    name = "sglang"

    def generate(self, request: GenerateRequest) -> Call:
        """One call: the same prompt n times, each with a seed of its own."""
        sampling = request.sampling
        most = MOST_KEPT if sampling.truncated else ALL_TOKENS
        common = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": min(sampling.top_k, MOST_KEPT) if sampling.top_k else most,
            "min_p": sampling.min_p,
            "stop_token_ids": sampling.stop_token_ids,
            # Without stop tokens nothing but the length ends a completion, also not those of the checkpoint.
            "ignore_eos": not sampling.stop_token_ids,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        body = {
            "input_ids": [request.prompt_ids] * sampling.n,
            "sampling_params": [{**common, "sampling_seed": _seed(sampling.seed, i)} for i in range(sampling.n)],
            "return_logprob": True,
            "return_sampling_mask": sampling.truncated,
            **({"return_routed_experts": True} if sampling.routes else {}),
            # See vllm/dialect.py.
            "cache_salt": request.request_id,
        }
        return Call("/generate", body)

    def completions(self, request: GenerateRequest, answer: Any) -> list[Completion]:
        if not isinstance(answer, list):
            raise Malformed(f"a list of samples was asked for, got {type(answer).__name__}")
        return [_completion(sample, request) for sample in answer]

    def score(self, token_ids: list[int]) -> Call:
        """One token is sampled too: the version of the pass that gave the log-probs stands beside it."""
        body = {
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        return Call("/generate", body)

    def scored(self, token_ids: list[int], answer: Any) -> ScoredTokens:
        about = answer["meta_info"]
        rows = about["input_token_logprobs"]
        given = [row[1] for row in rows]
        # It says 0 in place of the vocabulary's last token, of which it gives the right log-prob.
        if len(given) != len(token_ids) or any(one not in (own, 0) for one, own in zip(given, token_ids, strict=True)):
            raise Malformed(f"the log-probs are of {given}, not of {token_ids}")
        span = _spans(about, 1)[0]
        return ScoredTokens([float(row[0]) for row in rows[1:]], span.epoch, span.version)

    def refused(self, status: int, reason: str) -> bool:
        # Requests that were dropped, such as by a pause, may come as 400 too.
        return status in REFUSED and "abort" not in reason.lower()


DIALECT = SGLangDialect()


def _seed(seed: int, sample: int) -> int:
    """31 bits of (seed, sample)."""
    digest = hashlib.blake2b(f"{seed}:{sample}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def _completion(sample: Any, request: GenerateRequest) -> Completion:
    about = sample["meta_info"]
    finished = FINISHED.get(about["finish_reason"]["type"])
    if finished is None:
        return aborted()
    token_ids = [int(token) for token in sample["output_ids"]]
    rows = about["output_token_logprobs"]
    log_probs, kept = [float(row[0]) for row in rows], None
    if request.sampling.truncated:
        log_probs = [float(value) for value in about["output_token_sampling_logprobs"]]
        kept = [[int(token) for token in tokens] for tokens in about["output_token_sampling_mask"]]
    spans = _spans(about, len(token_ids))
    routes = None
    if request.sampling.routes:
        routes = _routes(about.get("routed_experts"), len(request.prompt_ids) + len(token_ids))
    return make_completion(token_ids, [row[1] for row in rows], log_probs, finished, spans, kept, routes)


def _routes(numbers: str | None, tokens: int) -> Routes:
    """int32 as base64, flat: [tokens - 1, layers, experts per token]. How many layers there are the model says."""
    if numbers is None:
        raise RequestRefused(
            "generate",
            "this SGLang does not say which experts its tokens had, which grpo.routing_replay needs: start it with "
            "--enable-return-routed-experts",
        )
    experts = np.frombuffer(base64.b64decode(numbers, validate=True), "<i4")
    routes = Routes(0, compact(experts.reshape(tokens - 1, 1, -1)))
    check_routes(routes, tokens)
    return routes


def _spans(about: dict[str, Any], tokens: int) -> list[VersionSpan]:
    whole = [{"version": about["weight_version"], "start": 0, "end": tokens}]
    return read_spans(about.get("weight_versions") or whole)
