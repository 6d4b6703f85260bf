"""The built-in rewards, for correctness, format and length of an answer."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

from torchtitan.rollout.conversation.thoughts import last_text, read_turn
from torchtitan.rollout.rewards.answers import final_answer, gold_answer, reference_text
from torchtitan.rollout.rewards.comparison import compare, is_text, words
from torchtitan.rollout.rewards.mathematics import same_mathematics
from torchtitan.rollout.rewards.quantities import tidy

PARTIAL_CREDIT = 0.5
REPETITION_NGRAM = 4

Completion = str | list[dict[str, Any]]
"""Text, or chat messages if the prompt was a chat"""


def texts(completions: Sequence[Completion], prefill: str = "") -> list[str]:
    """Return the text of every completion, after the `prefill` in its prompt. For a chat, this is the policy's last
    message."""
    return [prefill + last_text(completion) for completion in completions]


def answer_texts(
    completions: Sequence[Completion], prefill: str = "", final_texts: Sequence[str] | None = None, **_: Any
) -> list[str]:
    """Return the answer of every completion, without its thoughts (data/thoughts.py). A run hands it over as
    `final_texts`, read from the tokens; without them, it is read from the text."""
    if final_texts is not None:
        return list(final_texts)
    return [read_turn(last_text(completion), prefill).final_text for completion in completions]


def exact_match(*, completions: Sequence[Completion], answer: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """Return 1 if the completion's answer is the reference, ignoring white space around both, else 0; None without a
    reference."""
    rewards: list[float | None] = []
    for text, gold in zip(answer_texts(completions, **kwargs), answer, strict=True):
        reference = reference_text(gold)
        rewards.append(None if reference is None else float(text.strip() == reference.strip()))
    return rewards


def arithmetic(
    *, completions: Sequence[Completion], answer: Sequence[Any], finish_reasons: Sequence[str], **kwargs: Any
) -> list[float | None]:
    """Return 1 for the exact answer, else half the fraction of correct digits; 0 if the length is wrong or the
    completion was truncated; None without a reference."""
    rewards: list[float | None] = []
    for text, gold, reason in zip(answer_texts(completions, **kwargs), answer, finish_reasons, strict=True):
        reference = reference_text(gold)
        if reference is None:
            rewards.append(None)
        else:
            rewards.append(_digits_right(text, reference) if reason == "stop" else 0.0)
    return rewards


def _digits_right(text: str, gold: str) -> float:
    if len(text) != len(gold):
        return 0.0
    if text == gold:
        return 1.0
    return PARTIAL_CREDIT * sum(a == b for a, b in zip(text, gold, strict=True)) / len(gold)


def format(
    *,
    completions: Sequence[Completion],
    prefill: str = "",
    well_formed: Sequence[bool] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """Return 1 if the completion is one thought and then an answer, else 0: `<think>…</think>` and text behind it, or
    what the checkpoint's own marks say (data/thoughts.py). The prompt may have opened the thought."""
    if well_formed is None:
        well_formed = [read_turn(last_text(completion), prefill).well_formed for completion in completions]
    return [float(is_well_formed) for is_well_formed in well_formed]


def repetition(*, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float | None]:
    """Return minus the fraction of token 4-grams that repeat earlier ones: 0 (none) to almost -1 (a loop)."""
    return [-_repeated_share(ids) for ids in completion_ids]


def _repeated_share(ids: Sequence[Hashable]) -> float:
    grams = [tuple(ids[i : i + REPETITION_NGRAM]) for i in range(len(ids) - REPETITION_NGRAM + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def accuracy(*, completions: Sequence[Completion], answer: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """Return 1 if the completion's final answer equals the reference, else 0; None if the reference cannot be parsed.

    The final answer is the last \\boxed{…} outside of thoughts; without one, what follows "answer is" or "answer:"
    up to the end of the sentence, or else the last formula or number; an unclosed thought has none. References may be
    plain, boxed, LaTeX, or GSM8K's worked solutions that end in `#### 72`. An answer that takes too long to compare is
    wrong.
    """
    rewards: list[float | None] = []
    unclear: dict[int, tuple[str, str | None]] = {}
    for number, (text, gold) in enumerate(zip(answer_texts(completions, **kwargs), answer, strict=True)):
        wanted = gold_answer(gold)
        in_words = wanted is not None and is_text(wanted)
        given = wanted if wanted is not None and _says_only(text, wanted) else final_answer(text, in_words=in_words)
        rewards.append(None if wanted is None else compare(wanted, given))
        if wanted is not None and rewards[-1] is None:
            unclear[number] = (wanted, given)
    for number, verdict in zip(unclear, same_mathematics(list(unclear.values())), strict=True):
        rewards[number] = verdict
    return rewards


def _says_only(text: str, wanted: str) -> bool:
    """Whether a reference, or its words, which may be a sentence, are all of the text."""
    if text.strip() == wanted:
        return True
    expected = words(wanted)
    return expected is not None and words(tidy(text)) == expected


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
        if right is None:
            rewards.append(None)
        elif len(ids) >= max_completion_tokens:
            rewards.append(-1.0)
        else:
            rewards.append(size if right == 1.0 else -size)
    return rewards


def length(*, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float | None]:
    """Return the length reward of Kimi k1.5: 0.5 for the shortest completion of the group to -0.5 for the longest;
    wrong answers earn at most 0. None if the reference answer cannot be parsed."""
    counts = [len(ids) for ids in completion_ids]
    shortest, spread = min(counts), max(counts) - min(counts)
    rewards: list[float | None] = []
    for right, count in zip(accuracy(**kwargs), counts, strict=True):
        value = 0.5 - (count - shortest) / spread if spread else 0.0
        if right is None:
            rewards.append(None)
        else:
            rewards.append(value if right == 1.0 else min(0.0, value))
    return rewards
