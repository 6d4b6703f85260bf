"""The built-in reward `judge`: a language model behind an OpenAI API scores the completions of a group, or ranks them.

It runs in a reward worker. A judge that does not answer, or not in the form that it is told, gives no reward (None).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from torchtitan.config.rollout_tables import Judge as Settings
from torchtitan.rollout.rewards.builtin_rewards import Completion, answer_texts
from torchtitan.utils.typed_json import IN_PLACE_BYTES, Object, decode

FORMS = {
    "score": "End with one line `SCORE: n`, where n is a number from 0 (worst) to 10 (best).",
    "rank": "End with one line `RANKING: …`: the numbers of all answers from the best to the worst, such as `2, 1, 3`.",
}
SCORE, RANKING = re.compile(r"SCORE:\s*(\d+(?:\.\d+)?)"), re.compile(r"RANKING:\s*(\d+(?:\s*,\s*\d+)*)")
FIRST_PAUSE_S = 0.2
# Statuses other than these say that the request is wrong, which no repetition mends.
WORTH_REPEATING = (408, 409, 425, 429)
REASON_CHARACTERS = 500
# Judgements that are remembered, so that the same answers are not judged again.
REMEMBERED = 10_000


class Refused(Exception):
    """The judge has found fault with the request itself."""


# Of an attempt; LookupError, TypeError and ValueError are answers of another form.
FAILURES = (asyncio.TimeoutError, aiohttp.ClientError, Refused, LookupError, TypeError, ValueError)


@dataclass
class Asked:
    """What is asked about one group, and what it costs."""

    session: aiohttp.ClientSession
    question: str
    reference: object
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("calls", "cached", "away", "prompt_tokens", "completion_tokens"), 0)
    )


class Judge:
    """Asks the judge, and remembers what it has said."""

    def __init__(self, settings: Settings):
        """Raises OSError if the rubric cannot be read."""
        self._settings = settings
        self._rubric = Path(settings.rubric).expanduser().read_text(encoding="utf-8").strip()
        self._said: OrderedDict[str, Any] = OrderedDict()

    async def rewards(
        self, question: str, answers: Sequence[str], reference: object, log: Callable[[str, float], None]
    ) -> list[float | None]:
        """Return a reward from 0 to 1 for each answer, None where there is no judgement. log gets the metrics."""
        settings, distinct = self._settings, list(dict.fromkeys(answers))
        of_mode = self._rank if settings.mode == "rank" else self._score
        digest = hashlib.blake2b(json.dumps([question, distinct]).encode(), digest_size=4).hexdigest()
        twice = int(digest, 16) < settings.agreement_share * 2**32
        async with aiohttp.ClientSession() as session:
            asked = Asked(session, question, reference)
            first, *again = await asyncio.gather(*(of_mode(asked, distinct, number) for number in range(1 + twice)))
        for second in again:
            apart = [abs(a - b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
            if apart:
                log("judge/disagreement", sum(apart) / len(apart))
        for name, count in asked.counts.items():
            log(f"judge/{name}", count)
        tokens = asked.counts["prompt_tokens"], asked.counts["completion_tokens"]
        log("judge/cost", (tokens[0] * settings.prompt_price + tokens[1] * settings.completion_price) / 1e6)
        of_answer = dict(zip(distinct, first, strict=True))
        return [of_answer[one] for one in answers]

    async def _score(self, asked: Asked, answers: list[str], number: int) -> list[float | None]:
        def read(text: str) -> float:
            value = float(SCORE.findall(text)[-1])
            if value > 10:
                raise ValueError(f"a score of {value:g}")
            return value / 10

        return list(await asyncio.gather(*(self._ask(asked, [one], number, read) for one in answers)))

    async def _rank(self, asked: Asked, answers: list[str], number: int) -> list[float | None]:
        if len(answers) == 1:
            return [0.5]
        # Judges prefer what stands first, so the order is another one in each group, and backwards the second time.
        order = sorted(range(len(answers)), key=lambda i: hashlib.blake2b(answers[i].encode()).digest())
        order = order[::-1] if number else order

        def read(text: str) -> list[int]:
            places = [int(one) - 1 for one in RANKING.findall(text)[-1].split(",")]
            if sorted(places) != list(range(len(answers))):
                raise ValueError(f"a ranking of {[place + 1 for place in places]} for {len(answers)} answers")
            return places

        places = await self._ask(asked, [answers[i] for i in order], number, read)
        if places is None:
            return [None] * len(answers)
        rewards = {order[place]: 1 - position / (len(answers) - 1) for position, place in enumerate(places)}
        return [rewards[i] for i in range(len(answers))]

    async def _ask(self, asked: Asked, answers: list[str], number: int, read: Callable[[str], Any]) -> Any:
        """Return what `read` makes of the judge's answer, or None without one within judge.timeout_s."""
        settings = self._settings
        parts = [f"<question>\n{asked.question}\n</question>"]
        parts += [] if asked.reference is None else [f"<reference>\n{asked.reference}\n</reference>"]
        parts += [f"<answer {i}>\n{one}\n</answer {i}>" for i, one in enumerate(answers, start=1)]
        messages = [
            {"role": "system", "content": f"{self._rubric}\n\n{FORMS[settings.mode]}"},
            {"role": "user", "content": "\n\n".join(parts)},
        ]
        key = json.dumps([messages, number])
        if key in self._said:
            asked.counts["cached"] += 1
            self._said.move_to_end(key)
            return self._said[key]
        try:
            judged = await asyncio.wait_for(self._attempts(asked, messages, read), settings.timeout_s)
        except FAILURES as error:
            asked.counts["away"] += 1
            print(f"no judgement from {settings.url}: {error!r}"[:REASON_CHARACTERS], file=sys.stderr, flush=True)
            return None
        self._said[key] = judged
        while len(self._said) > REMEMBERED:
            self._said.popitem(last=False)
        return judged

    async def _attempts(self, asked: Asked, messages: list[dict[str, str]], read: Callable[[str], Any]) -> Any:
        """Raises one of FAILURES: that of the last attempt, or Refused at once."""
        settings = self._settings
        body = {"model": settings.model, "messages": messages, "max_tokens": settings.max_tokens}
        headers = {"Authorization": f"Bearer {os.environ[settings.key_variable]}"} if settings.key_variable else {}
        timeout = aiohttp.ClientTimeout(total=settings.timeout_s / (settings.max_retries + 1))
        path = f"{settings.url.rstrip('/')}/chat/completions"
        for attempt in range(settings.max_retries + 1):
            asked.counts["calls"] += 1
            try:
                async with asked.session.post(path, json=body, headers=headers, timeout=timeout) as response:
                    answered = await _body(response)
                    if 400 <= response.status < 500 and response.status not in WORTH_REPEATING:
                        text = answered[:REASON_CHARACTERS].decode(errors="replace")
                        raise Refused(f"{response.status}: {text}")
                    response.raise_for_status()
                    data = decode(Object, answered)
                for name in ("prompt_tokens", "completion_tokens"):
                    asked.counts[name] += (data.get("usage") or {}).get(name) or 0
                return read(data["choices"][0]["message"]["content"])
            except FAILURES as error:
                if attempt == settings.max_retries or isinstance(error, Refused):
                    raise
                await asyncio.sleep(FIRST_PAUSE_S * 2**attempt)
        raise AssertionError("the last attempt returns or raises")


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """Return an answer's bytes. Raises ValueError where there are too many."""
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) > IN_PLACE_BYTES:
            raise ValueError(f"an answer of more than {IN_PLACE_BYTES} bytes")
    return bytes(data)


_judges: dict[str, Judge] = {}


def configure(settings: dict[str, Any]) -> None:
    """Set the table [judge] of this process. Raises OSError if the rubric cannot be read."""
    _judges["judge"] = Judge(Settings(**settings))


async def judge(
    *,
    prompts: Sequence[Any],
    completions: Sequence[Completion],
    log_metric: Callable[[str, float], None],
    answer: Sequence[Any] = (),
    **kwargs: Any,
) -> list[float | None]:
    """Return for each answer of a group, without its thoughts, the judge's score ÷ 10, or its place in the ranking from
    1 (best) to 0."""
    question = prompts[0]
    if not isinstance(question, str):
        question = "\n\n".join(f"{message['role']}: {message['content']}" for message in question)
    answers = answer_texts(completions, **kwargs)
    return await _judges["judge"].rewards(question, answers, next(iter(answer), None), log_metric)
