"""The built-in rewards, for correctness, format and length of an answer.

If a plain comparison of numbers does not decide, math-verify does, in a child process: sympy evaluates towers of powers
in C code, which can only be stopped by killing the process.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import re
import select
import signal
import traceback
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torchtitan.rollout.rewards.answers import MAX_ANSWER_CHARACTERS, compare, final_answer, gold_answer

PARTIAL_CREDIT = 0.5
THINK_THEN_ANSWER = re.compile(r"\s*<think>(?P<thought>.*?)</think>(?P<answer>.*)", re.DOTALL)
REPETITION_NGRAM = 4

Completion = str | list[dict[str, Any]]
"""Text, or chat messages if the prompt was a chat"""


def texts(completions: Sequence[Completion], prefill: str = "") -> list[str]:
    """Return the text of every completion, after the `prefill` in its prompt. For a chat, this is the policy's last
    message: a truncated conversation may end with a tool's result, which is not an answer."""
    return [prefill + (one if isinstance(one, str) else _said_last(one)) for one in completions]


def _said_last(messages: Sequence[dict[str, Any]]) -> str:
    return next((one["content"] for one in reversed(messages) if one["role"] == "assistant"), "")


def exact_match(*, completions: Sequence[Completion], answer: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """Return 1 if the completion is the answer, ignoring white space around both, else 0; None without an answer."""
    return [
        None if gold is None else float(text.strip() == str(gold).strip())
        for text, gold in zip(texts(completions), answer, strict=True)
    ]


def arithmetic(
    *, completions: Sequence[Completion], answer: Sequence[Any], finish_reasons: Sequence[str], **kwargs: Any
) -> list[float | None]:
    """Return 1 for the exact answer, else half the fraction of correct digits; 0 if the length is wrong or the
    completion was truncated; None without an answer."""
    return [
        None if gold is None else _digits_right(text, str(gold)) if reason == "stop" else 0.0
        for text, gold, reason in zip(texts(completions), answer, finish_reasons, strict=True)
    ]


def _digits_right(text: str, gold: str) -> float:
    if len(text) != len(gold):
        return 0.0
    if text == gold:
        return 1.0
    return PARTIAL_CREDIT * sum(a == b for a, b in zip(text, gold, strict=True)) / len(gold)


def format(*, completions: Sequence[Completion], prefill: str = "", **kwargs: Any) -> list[float | None]:
    """Return 1 if the completion is one `<think>…</think>` and then an answer, else 0. `<think>` may end the prompt."""
    return [float(_thinks_then_answers(text)) for text in texts(completions, prefill)]


def _thinks_then_answers(text: str) -> bool:
    match = THINK_THEN_ANSWER.fullmatch(text)
    if match is None or text.count("<think>") != 1 or text.count("</think>") != 1:
        return False
    return bool(match["answer"].strip())


def repetition(*, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float | None]:
    """Return minus the fraction of token 4-grams that repeat earlier ones: 0 (none) to almost -1 (a loop)."""
    return [-_repeated_share(ids) for ids in completion_ids]


def _repeated_share(ids: Sequence[Hashable]) -> float:
    grams = [tuple(ids[i : i + REPETITION_NGRAM]) for i in range(len(ids) - REPETITION_NGRAM + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def accuracy(
    *, completions: Sequence[Completion], answer: Sequence[Any], prefill: str = "", **kwargs: Any
) -> list[float | None]:
    """Return 1 if the completion's final answer equals the reference, else 0; None if the reference cannot be parsed.

    The final answer is the last \\boxed{…} outside <think>…</think>; without one, what follows "answer is" or "answer:"
    up to the end of the sentence, or else the last formula or number; an unclosed thought has none. References may be
    plain, boxed, LaTeX, or GSM8K's worked solutions that end in `#### 72`. An answer that takes too long to compare is
    wrong.
    """
    rewards: list[float | None] = []
    unclear: dict[int, tuple[str, str | None]] = {}
    for number, (text, gold) in enumerate(zip(texts(completions, prefill), answer, strict=True)):
        wanted, given = gold_answer(gold), final_answer(text)
        rewards.append(None if wanted is None else compare(wanted, given))
        if wanted is not None and rewards[-1] is None:
            unclear[number] = (wanted, given)
    for number, verdict in zip(unclear, same_mathematics(list(unclear.values())), strict=True):
        rewards[number] = verdict
    return rewards


# DAPO penalises the last 4,096 of 20,480 tokens.
OVERLONG_SHARE = 0.2


def soft_overlong(
    *, completion_ids: Sequence[Sequence[int]], max_completion_tokens: int, **kwargs: Any
) -> list[float | None]:
    """DAPO's soft overlong punishment: 0 up to 80 % of the token limit, then linearly down to -1 at the limit."""
    free = (1.0 - OVERLONG_SHARE) * max_completion_tokens
    span = max_completion_tokens - free
    return [-min(1.0, max(0.0, (len(ids) - free) / span)) for ids in completion_ids]


def cosine_length(
    *, completion_ids: Sequence[Sequence[int]], max_completion_tokens: int, **kwargs: Any
) -> list[float | None]:
    """Return correctness scaled by length along a cosine (Yeo et al. 2025, equation 1). A correct answer earns 1
    (short) to 0.5 (long), a wrong one -1 (short) to -0.5, and any completion that reaches the token limit -1. None if
    the reference answer cannot be parsed."""
    rewards: list[float | None] = []
    for right, ids in zip(accuracy(**kwargs), completion_ids, strict=True):
        size = 0.75 + 0.25 * math.cos(math.pi * len(ids) / max_completion_tokens)
        value = -1.0 if len(ids) >= max_completion_tokens else size if right == 1.0 else -size
        rewards.append(None if right is None else value)
    return rewards


def length(*, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float | None]:
    """Return the length reward of Kimi k1.5: 0.5 for the shortest completion of the group to -0.5 for the longest;
    wrong answers earn at most 0. None if the reference answer cannot be parsed."""
    counts = [len(ids) for ids in completion_ids]
    shortest, spread = min(counts), max(counts) - min(counts)
    rewards: list[float | None] = []
    for right, count in zip(accuracy(**kwargs), counts, strict=True):
        value = 0.5 - (count - shortest) / spread if spread else 0.0
        rewards.append(None if right is None else value if right == 1.0 else min(0.0, value))
    return rewards


# Prose: two plain words in a row. math-verify would read them as a product of letters.
PROSE = re.compile(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}")
LATEX_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{[^{}]*\}|\\[A-Za-z]+")
# Seconds of a processor for one answer; where a call has already had so many slow ones, for each further one, which is
# still more than ordinary answers take.
ANSWER_SECONDS = 1.0
MANY_SLOW = 3
HURRIED_SECONDS = 0.25
# On a busy machine, one CPU second takes longer; this bounds the wall-clock time.
WALL_FACTOR = 5
VERDICTS: dict[bytes, float | None] = {b"1": 1.0, b"0": 0.0, b"?": None}
# Compared once before the first fork, so that children inherit the parser's and simplifier's tables, slow to fill.
EXAMPLES = (
    (r"\frac{1}{2}", "0.5"),
    ("x^2+1=y", "y=1+x^2"),
    (r"2\sqrt{3}\pi", r"\sqrt{12}\pi"),
    (r"x \in [0,1)", "[0,1)"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
)


def same_mathematics(pairs: Sequence[tuple[str, str | None]]) -> list[float | None]:
    """For every (reference, answer), return 1 if they are equal, else 0; None if the reference cannot be parsed.

    An answer that takes more than ANSWER_SECONDS of CPU time, or crashes the process, is wrong.
    """
    verdicts: list[float | None] = []
    slow = 0
    while len(verdicts) < len(pairs):
        check = checker()
        seconds = ANSWER_SECONDS if slow < MANY_SLOW else HURRIED_SECONDS
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _answer(check, pairs[len(verdicts) :], writer, seconds)
        os.close(writer)
        try:
            while len(verdicts) < len(pairs) and select.select([reader], [], [], WALL_FACTOR * seconds)[0]:
                if not (verdict := os.read(reader, 1)):
                    break
                verdicts.append(VERDICTS[verdict])
        finally:
            os.close(reader)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if len(verdicts) < len(pairs):
            verdicts.append(0.0)
            slow += 1
    return verdicts


def _answer(
    check: Callable[[str, str | None], bytes], pairs: Sequence[tuple[str, str | None]], writer: int, seconds: float
) -> None:
    """Run the child: write one byte for each pair, which may take at most `seconds` of CPU time; never return."""
    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for expected, answer in pairs:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            signal.alarm(1 + int(WALL_FACTOR * seconds))  # the last resort, if the parent has died
            os.write(writer, check(expected, answer))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


@functools.cache
def checker() -> Callable[[str, str | None], bytes]:
    # Slow to import (sympy), and not needed for plain numbers.
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn that its own time limit is off

    def check(expected: str, answer: str | None) -> bytes:
        prose = PROSE.search(LATEX_TEXT.sub(" ", expected))
        gold = parse(expected if prose else f"\\boxed{{{expected}}}", parsing_timeout=None)
        if all(isinstance(reading, str) for reading in gold):  # it could not parse the text
            return b"?"
        short = answer is not None and len(answer) <= MAX_ANSWER_CHARACTERS
        given = parse(f"\\boxed{{{answer}}}", parsing_timeout=None) if short else []
        return b"1" if given and verify(gold, given, timeout_seconds=None) else b"0"

    for expected, answer in EXAMPLES:
        check(expected, answer)
    return check
