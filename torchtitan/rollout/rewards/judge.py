"""A language model as a reward: one behind an OpenAI API scores the completions of a group, or ranks them.

    # my_rewards.py; rewards.functions = ["my_rewards:judge"], rewards.sandbox.network = true
    judge = Judge("http://127.0.0.1:8000/v1", model="Qwen/Qwen3-8B", rubric="Short answers are good.")

It runs in a reward worker. A judge that does not answer, or not in the form that is asked for, gives no reward (None).
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
from typing import Any, Literal

import aiohttp

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


# Of an attempt; the last four are answers of another form.
FAILURES = (
    *(TimeoutError, aiohttp.ClientError, Refused),
    *(AttributeError, LookupError, TypeError, ValueError),
)


@dataclass
class GroupQuestion:
    """What is asked about one group, and what it costs."""

    session: aiohttp.ClientSession
    question: str
    reference: object
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("calls", "cached", "away", "prompt_tokens", "completion_tokens"), 0)
    )


@dataclass
class Judge:
    """A reward function. Called with a group, it gives each answer, without its thoughts, the judge's score ÷ 10, or
    its place in the ranking from 1 (best) to 0."""

    url: str
    """Address of an OpenAI API, such as http://127.0.0.1:8000/v1"""
    model: str
    """Name of the model there"""
    rubric: str
    """What is good, in plain words"""
    mode: Literal["score", "rank"] = "score"
    """A score from 0 to 10 for each completion, or one ranking of a group's completions"""
    key_variable: str = ""
    """Environment variable that holds the key of the API (rewards.sandbox.variables hands it over); empty sends none"""
    max_tokens: int = 512
    """Longest answer of the judge"""
    timeout_s: float = 8.0
    """Deadline of one judgement, with all its attempts; less than rewards.timeout_s"""
    max_retries: int = 2
    """How often a judgement is asked for again after a failure; then there is no reward"""
    agreement_share: float = 0.0
    """Share of the groups that are judged twice, a ranking the second time in the reverse order, to measure
    logged/judge/disagreement"""
    prompt_price: float = 0.0
    """Price of a million tokens that the judge reads, for logged/judge/cost"""
    completion_price: float = 0.0
    """Price of a million tokens that the judge writes"""

    def __post_init__(self) -> None:
        """Raises ValueError: a run with this judge could not have a single reward."""
        problems = []
        if not self.url.startswith(("http://", "https://")):
            problems.append(f"url = {self.url!r} must be the http:// address of an API")
        if not self.model:
            problems.append("model must name the judge's model")
        if not self.rubric.strip():
            problems.append("rubric must say what is good")
        if self.mode not in FORMS:
            problems.append(f"mode = {self.mode!r} must be score or rank")
        if self.key_variable and self.key_variable not in os.environ:
            problems.append(
                f"there is no environment variable {self.key_variable}: name it in rewards.sandbox.variables"
            )
        if problems:
            raise ValueError("Judge: " + "; ".join(problems))
        self._judgements: OrderedDict[str, Any] = OrderedDict()

    async def __call__(
        self,
        *,
        prompts: Sequence[Any],
        completions: Sequence[Completion],
        log_metric: Callable[[str, float], None],
        answer: Sequence[Any] = (),
        **kwargs: Any,
    ) -> list[float | None]:
        """Return a reward from 0 to 1 for each completion of a group, None where there is no judgement."""
        question = prompts[0]
        if not isinstance(question, str):
            question = "\n\n".join(f"{message['role']}: {message['content']}" for message in question)
        answers = answer_texts(completions, **kwargs)
        distinct = list(dict.fromkeys(answers))
        of_mode = self._rank if self.mode == "rank" else self._score
        digest = hashlib.blake2b(json.dumps([question, distinct]).encode(), digest_size=4).hexdigest()
        twice = int(digest, 16) < self.agreement_share * 2**32
        async with aiohttp.ClientSession() as session:
            group = GroupQuestion(session, question, next(iter(answer), None))
            first, *again = await asyncio.gather(*(of_mode(group, distinct, number) for number in range(1 + twice)))
        for second in again:
            pairs = zip(first, second, strict=True)
            differences = [abs(a - b) for a, b in pairs if a is not None and b is not None]
            if differences:
                log_metric("judge/disagreement", sum(differences) / len(differences))
        for name, count in group.counts.items():
            log_metric(f"judge/{name}", count)
        price = group.counts["prompt_tokens"] * self.prompt_price
        price += group.counts["completion_tokens"] * self.completion_price
        log_metric("judge/cost", price / 1e6)
        reward_of = dict(zip(distinct, first, strict=True))
        return [reward_of[text] for text in answers]

    async def _score(self, group: GroupQuestion, answers: list[str], number: int) -> list[float | None]:
        def read(text: str) -> float:
            value = float(SCORE.findall(text)[-1])
            if value > 10:
                raise ValueError(f"a score of {value:g}")
            return value / 10

        return list(await asyncio.gather(*(self._ask(group, [text], number, read) for text in answers)))

    async def _rank(self, group: GroupQuestion, answers: list[str], number: int) -> list[float | None]:
        if len(answers) == 1:
            return [0.5]
        # Judges prefer what stands first, so the order is another one in each group, and backwards the second time.
        order = sorted(range(len(answers)), key=lambda i: hashlib.blake2b(answers[i].encode()).digest())
        order = order[::-1] if number else order

        def read(text: str) -> list[int]:
            places = [int(place) - 1 for place in RANKING.findall(text)[-1].split(",")]
            if sorted(places) != list(range(len(answers))):
                raise ValueError(f"a ranking of {[place + 1 for place in places]} for {len(answers)} answers")
            return places

        places = await self._ask(group, [answers[i] for i in order], number, read)
        if places is None:
            return [None] * len(answers)
        rewards = {order[place]: 1 - position / (len(answers) - 1) for position, place in enumerate(places)}
        return [rewards[i] for i in range(len(answers))]

    async def _ask(self, group: GroupQuestion, answers: list[str], number: int, read: Callable[[str], Any]) -> Any:
        """Return what `read` makes of the judge's answer, or None without one within timeout_s."""
        parts = [f"<question>\n{group.question}\n</question>"]
        parts += [] if group.reference is None else [f"<reference>\n{group.reference}\n</reference>"]
        parts += [f"<answer {i}>\n{text}\n</answer {i}>" for i, text in enumerate(answers, start=1)]
        messages = [
            {"role": "system", "content": f"{self.rubric.strip()}\n\n{FORMS[self.mode]}"},
            {"role": "user", "content": "\n\n".join(parts)},
        ]
        key = json.dumps([messages, number])
        if key in self._judgements:
            group.counts["cached"] += 1
            self._judgements.move_to_end(key)
            return self._judgements[key]
        try:
            judged = await asyncio.wait_for(self._attempts(group, messages, read), self.timeout_s)
        except FAILURES as error:
            group.counts["away"] += 1
            reason = f"no judgement from {self.url}: {error!r}"[:REASON_CHARACTERS]
            if isinstance(error, aiohttp.ClientConnectorError):
                reason += " (isolated functions reach nothing without rewards.network = true)"
            print(reason, file=sys.stderr, flush=True)
            return None
        self._judgements[key] = judged
        while len(self._judgements) > REMEMBERED:
            self._judgements.popitem(last=False)
        return judged

    async def _attempts(self, group: GroupQuestion, messages: list[dict[str, str]], read: Callable[[str], Any]) -> Any:
        """Raises one of FAILURES: that of the last attempt, or Refused at once."""
        body = {"model": self.model, "messages": messages, "max_tokens": self.max_tokens}
        headers = {"Authorization": f"Bearer {os.environ[self.key_variable]}"} if self.key_variable else {}
        timeout = aiohttp.ClientTimeout(total=self.timeout_s / (self.max_retries + 1))
        path = f"{self.url.rstrip('/')}/chat/completions"
        for attempt in range(self.max_retries + 1):
            group.counts["calls"] += 1
            try:
                async with group.session.post(path, json=body, headers=headers, timeout=timeout) as response:
                    answered = await _body(response)
                    if 400 <= response.status < 500 and response.status not in WORTH_REPEATING:
                        text = answered[:REASON_CHARACTERS].decode(errors="replace")
                        raise Refused(f"{response.status}: {text}")
                    response.raise_for_status()
                    data = decode(Object, answered)
                for name in ("prompt_tokens", "completion_tokens"):
                    group.counts[name] += (data.get("usage") or {}).get(name) or 0
                return read(data["choices"][0]["message"]["content"])
            except FAILURES as error:
                if attempt == self.max_retries or isinstance(error, Refused):
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
