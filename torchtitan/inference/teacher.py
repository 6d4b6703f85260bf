"""What a teacher on a server is asked, and its answers. This module does not import torch."""

from __future__ import annotations

import itertools
import math
from typing import Any

from torchtitan.inference.actor_client import JsonClient
from torchtitan.inference.answer_checks import check_log_probs, check_token_ids
from torchtitan.inference.answers import Outcome, Top, array, exchange, outcome_of, scored_bytes, values
from torchtitan.inference.engines.descriptor import TeacherScores
from torchtitan.inference.engines.registry import load_engine
from torchtitan.utils.reader_process import Pieces
from torchtitan.utils.typed_json import WrongForm, without_collection

# Of all tokens it is 1; log-probs that are rounded to bfloat16 may give a little more.
MOST_PROBABILITY = 1.02


def read_taught(about: dict[str, Any], answer: bytes | memoryview) -> bytes:
    """The reading function for a teacher's answer: log-probs at temperature 1 of all tokens but the first, and the
    `top` likeliest in each of these places."""

    def read() -> Outcome:
        token_ids, top = about["token_ids"], about["top"]
        scores = load_engine(about["backend"]).taught(token_ids, top, answer)
        _check(scores, token_ids)
        likeliest = _likeliest(scores, top)
        if top and [len(row) for row in likeliest] != [top] * (len(token_ids) - 1):
            lengths = sorted({len(row) for row in likeliest})
            raise WrongForm(f"{top} tokens were requested for every place, got {lengths}")
        entries = list(itertools.chain.from_iterable(likeliest))
        ids = [token for _, token in entries]
        log_probs = [log_prob for log_prob, _ in entries]
        check_log_probs(scores.log_probs, "score")  # type: ignore[arg-type] # _check() has refused None
        check_log_probs(log_probs, "score", "of one of the likeliest tokens, the log-prob")
        check_token_ids(ids, about["vocabulary"], "score")
        _check_probabilities(likeliest)
        return Outcome(log_probs=array(scores.log_probs, "<f8"), top=(array(ids, "<i8"), array(log_probs, "<f8")))

    return outcome_of(read)


def _check(scores: TeacherScores, token_ids: list[int]) -> None:
    if len(scores.log_probs) != len(token_ids) - 1 or None in scores.log_probs:
        raise WrongForm(f"{len(scores.log_probs)} log-probs were returned for {len(token_ids)} tokens")
    if any(None in entry for row in scores.likeliest for entry in row):
        raise WrongForm("one of the likeliest tokens has no number or no log-prob")


def _check_probabilities(likeliest: list[list[tuple[Any, Any]]]) -> None:
    """Raise WrongForm unless the tokens of each place are different ones, whose probabilities are no more than 1."""
    for place, row in enumerate(likeliest, start=1):
        if len({token for _, token in row}) < len(row):
            raise WrongForm(f"the likeliest tokens of place {place} have one twice")
        total = sum(math.exp(log_prob) for log_prob, _ in row)
        if total > MOST_PROBABILITY:
            text = f"the probabilities of the likeliest tokens of place {place} are {total:.3g} in sum"
            raise WrongForm(f"{text}: these are no log-probs (vLLM's --logprobs-mode raw_logits has others)")


def _likeliest(scores: TeacherScores, top: int) -> list[list[tuple[Any, Any]]]:
    """The `top` likeliest of each place, the likeliest first, and of equal ones that with the lowest number."""
    return [sorted(row, key=lambda entry: (-entry[0], entry[1]))[:top] for row in scores.likeliest]  # type: ignore[operator]


async def ask_teacher(
    client: JsonClient,
    backend: str,
    token_ids: list[int],
    top: int,
    timeout_s: float,
    vocabulary: int | None = None,
) -> tuple[list[float], list[Top]]:
    """Return the log-probs of all tokens but the first, and the `top` likeliest tokens in their places. backend:
    distill.server.backend. vocabulary: of the run's model, if that is known.

    Raises ActorError: see JsonClient.fetch; WrongForm: the answer has another form.
    """
    call = load_engine(backend).ask_teacher(token_ids, top)
    most = scored_bytes(len(token_ids), top)
    pieces: Pieces = await client.fetch(
        "score", "POST", call.path, timeout_s, call.body, most_bytes=most, repeatable=True
    )
    about = {"backend": backend, "token_ids": token_ids, "top": top, "vocabulary": vocabulary}
    outcome = await exchange(f"{__name__}:read_taught", about, pieces)
    if outcome.refused:
        raise WrongForm(f"{call.path} did not answer as distill.server.backend does: {outcome.reason}")
    likeliest: list[Top] = []
    if top and outcome.top is not None:
        ids, log_probs = values(outcome.top[0], "<i8"), values(outcome.top[1], "<f8")
        # One place at a time, so that other threads get their turns.
        with without_collection():
            for first in range(0, len(ids), top):
                last = first + top
                likeliest.append((ids[first:last].tolist(), log_probs[first:last].tolist()))
    return values(outcome.log_probs, "<f8").tolist(), likeliest
