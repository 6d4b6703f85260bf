"""How vLLM's /inference/v1/generate is asked for tokens, and how it answers. Pure functions; no torch."""

from __future__ import annotations

import base64
import io
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
from torchtitan.inference.vllm.engine import GENERATE

REFUSED = (400, 413, 422)


class VLLMDialect:
    """Of versions 0.32.0 and 0.33.0; see agent.client.Dialect. The server runs with --enable-scale-out, which has
    this route, and --logprobs-mode processed_logprobs: those that tokens were sampled with."""

    name = "vllm"

    def generate(self, request: GenerateRequest) -> Call:
        """One call; vLLM seeds sample i with seed + i."""
        sampling = request.sampling
        body = {
            "request_id": request.request_id,
            "token_ids": request.prompt_ids,
            "sampling_params": {
                "n": sampling.n,
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
                "seed": sampling.seed,
                "stop_token_ids": sampling.stop_token_ids,
                # Only the stop tokens that are asked for, not also those of the checkpoint.
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
            },
            # A request shares a prefix among its own samples alone, unless the server knows a name for the weights
            # that it holds (PrefixKeyMiddleware): one that it does not know could outlive them.
            "cache_salt": request.request_id,
        }
        return Call(GENERATE, body)

    def completions(self, request: GenerateRequest, answer: Any) -> list[Completion]:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [_completion(choice, request) for choice in choices]

    def score(self, token_ids: list[int]) -> Call:
        """One token is sampled too: the version of the pass that gave the log-probs stands beside it."""
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "ignore_eos": True, "detokenize": False}
        return Call(GENERATE, {"token_ids": token_ids, "sampling_params": sampling})

    def scored(self, token_ids: list[int], answer: Any) -> ScoredTokens:
        (choice,) = answer["choices"]
        span = _spans(choice, 1)[0]
        rows = answer["prompt_logprobs"]
        if len(rows) != len(token_ids):
            raise Malformed(f"{len(rows)} log-probs came for {len(token_ids)} tokens")
        values = [float(row[str(token)]["logprob"]) for row, token in zip(rows[1:], token_ids[1:], strict=True)]
        return ScoredTokens(values, span.epoch, span.version)

    def refused(self, status: int, reason: str) -> bool:
        return status in REFUSED


DIALECT = VLLMDialect()


def _completion(choice: dict[str, Any], request: GenerateRequest) -> Completion:
    finished = FINISHED.get(choice["finish_reason"])
    if finished is None:
        return aborted()
    truncated, kept = request.sampling.truncated, choice.get("sampling_mask")
    if truncated and kept is None:
        raise RequestRefused(
            "generate",
            "this vLLM does not say which tokens top-p, top-k or min-p kept, without which their log-probs mean "
            "nothing: start it with --return-sampling-mask where it has that, or sample without truncation",
        )
    token_ids = [int(token) for token in choice["token_ids"]]
    rows = choice["logprobs"]["content"]
    scored, log_probs = [row["token_id"] for row in rows], [float(row["logprob"]) for row in rows]
    spans = _spans(choice, len(token_ids))
    routes = None
    if request.sampling.routes:
        routes = _routes(choice.get("routed_experts"), len(request.prompt_ids) + len(token_ids))
    return make_completion(token_ids, scored, log_probs, finished, spans, kept if truncated else None, routes)


def _routes(npy: str | None, tokens: int) -> Routes:
    """numpy's own file format as base64: [tokens - 1, layers, experts per token]."""
    if npy is None:
        raise RequestRefused(
            "generate",
            "this vLLM does not say which experts its tokens had, which grpo.routing_replay needs: start it with "
            "--enable-return-routed-experts, which needs its Model Runner V2 and prefix caching",
        )
    routes = Routes(0, compact(np.load(io.BytesIO(base64.b64decode(npy)), allow_pickle=False)))
    check_routes(routes, tokens)
    return routes


def _spans(choice: dict[str, Any], tokens: int) -> list[VersionSpan]:
    spans = read_spans(choice["weight_versions"] or [])
    if sum(span.end - span.start for span in spans) != tokens:
        raise Malformed(f"the versions {choice['weight_versions']} are not those of {tokens} tokens")
    return spans
