"""What a teacher on a server is asked, and its answers. This module does not import torch."""

from __future__ import annotations

from typing import Any

import msgspec

from torchtitan.inference.actor_client import JsonClient
from torchtitan.inference.answers import EmbeddedScores, Outcome, Top, array, exchange, outcome_of, scored_bytes, values
from torchtitan.inference.engines.sglang.engine import ENGINE as SGLANG
from torchtitan.inference.engines.sglang.engine import Sample
from torchtitan.inference.engines.vllm.engine import Row
from torchtitan.utils.typed_json import Natural, WrongForm, decode, without_collection


class _Taught(EmbeddedScores):
    top: list[tuple[list[Natural], list[float]]] | None = None


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, Row] | None]


class _Completions(msgspec.Struct):
    choices: list[_Choice]


def _question(backend: str, token_ids: list[int], top: int) -> tuple[str, dict[str, Any]]:
    """Return path and body of the request to a distill.teacher_backend server for the log-probs of these tokens, and of
    the `top` likeliest in each place."""
    if backend == "embedded":
        return "/v1/score", {"token_ids": token_ids, "top": top}
    if backend == "sglang":
        call = SGLANG.score(token_ids)
        return call.path, {**call.body, "top_logprobs_num": top} if top else call.body
    return "/v1/completions", {"prompt": token_ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top}


def _read(
    backend: str, token_ids: list[int], top: int, answer: bytes | memoryview
) -> tuple[list[float | None], list[list[tuple[float | None, int | None]]]]:
    """Return the log-probs of all tokens but the first, and pairs of log-prob and id in each of these places. Raises
    ValueError, KeyError or IndexError for an answer of another form."""
    if backend == "embedded":
        taught = decode(_Taught, answer, len(answer))
        return [*taught.log_probs], [list(zip(given, ids, strict=True)) for ids, given in taught.top or []]
    if backend == "sglang":
        about = decode(Sample, answer, len(answer)).meta_info
        likeliest = (about.input_top_logprobs or [])[1:] if top else []
        return [row.logprob for row in about.input_token_logprobs[1:]], [
            [(one.logprob, one.token_id) for one in row or []] for row in likeliest
        ]
    rows = [row or {} for row in decode(_Completions, answer, len(answer)).choices[0].prompt_logprobs[1:]]
    given = [row[str(token)].logprob for row, token in zip(rows, token_ids[1:], strict=True)]
    # The token that is there comes too, whether or not it is among the likeliest.
    return [*given], [[(one.logprob, int(token)) for token, one in row.items()] for row in rows] if top else []


def read_taught(about: dict[str, Any], answer: bytes | memoryview) -> bytes:
    """The reading function for a teacher's answer: log-probs at temperature 1 of all tokens but the first, and the
    `top` likeliest in each of these places."""

    def read() -> Outcome:
        token_ids, top = about["token_ids"], about["top"]
        log_probs, pairs = _read(about["backend"], token_ids, top, answer)
        if len(log_probs) != len(token_ids) - 1 or None in log_probs:
            raise WrongForm(f"{len(log_probs)} log-probs were returned for {len(token_ids)} tokens")
        if any(None in pair for row in pairs for pair in row):
            raise WrongForm("one of the likeliest tokens has no number or no log-prob")
        best = [sorted(row, key=lambda one: (-one[0], one[1]))[:top] for row in pairs]  # type: ignore[operator]
        if top and [len(row) for row in best] != [top] * (len(token_ids) - 1):
            lengths = sorted({len(row) for row in best})
            raise WrongForm(f"{top} tokens were requested for every place, got {lengths}")
        flat = [one for row in best for one in row]
        likeliest = array([one[1] for one in flat], "<i8"), array([one[0] for one in flat], "<f8")
        return Outcome(log_probs=array(log_probs, "<f8"), top=likeliest)

    return outcome_of(read)


async def ask_teacher(
    client: JsonClient, backend: str, token_ids: list[int], top: int, timeout_s: float
) -> tuple[list[float], list[Top]]:
    """Return the log-probs of all tokens but the first, and the `top` likeliest tokens in their places.

    Raises ActorError: see JsonClient.fetch; WrongForm: the answer has another form.
    """
    path, body = _question(backend, token_ids, top)
    pieces = await client.fetch("score", "POST", path, timeout_s, body, most_bytes=scored_bytes(len(token_ids), top))
    about = {"backend": backend, "token_ids": token_ids, "top": top}
    outcome = await exchange(f"{__name__}:read_taught", about, pieces)
    if outcome.refused:
        raise WrongForm(f"{path} did not answer as distill.teacher_backend does: {outcome.reason}")
    likeliest: list[Top] = []
    if top and outcome.top is not None:
        ids, log_probs = (values(one, dtype) for one, dtype in zip(outcome.top, ("<i8", "<f8"), strict=True))
        places = range(0, len(ids), top)
        # One by one, so that other threads get their turns.
        with without_collection():
            likeliest = [(ids[at : at + top].tolist(), log_probs[at : at + top].tolist()) for at in places]
    return values(outcome.log_probs, "<f8").tolist(), likeliest
