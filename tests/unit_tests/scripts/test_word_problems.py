"""The task of benchmarks/learning.py: results are held against the numbers that are read off the question."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest

from benchmarks.word_problems import CARELESS, make_rows
from torchtitan.rollout.rewards.builtin_rewards import accuracy

# By a word that only questions of this kind have: the result from the question's numbers, in their order.
RESULTS: dict[str, Callable[..., int]] = {
    " buys ": lambda count, price, paid: paid - count * price,
    " finds ": lambda has, gets, gives: has + gets - gives,
    "Every ": lambda each, places, more: each * places + more,
    " share ": lambda total, lost, children: (total - lost) // children,
    " together?": lambda fewer, more: fewer + fewer + more,
    " rides ": lambda speed, hours, walked, back: speed * hours + walked - back,
}
SIGNS: dict[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "/": lambda left, right: left // right,
}


def test_answers_are_careless_in_the_stated_share_and_their_arithmetic_is_right() -> None:
    rows = make_rows(3000, seed=3)
    rewards = accuracy(completions=[row["completion"] for row in rows], answer=[row["answer"] for row in rows])
    steps: Counter[tuple[str, int, float | None]] = Counter()
    for row, reward in zip(rows, rewards, strict=True):
        question, worked = row["prompt"], row["completion"]
        (kind,) = (mark for mark in RESULTS if mark in question)
        assert int(row["answer"]) == RESULTS[kind](*map(int, re.findall(r"\d+", question)))
        boxed = re.fullmatch(r".* The answer is \\boxed\{(\d+)\}", worked)
        assert boxed and reward == float(boxed[1] == row["answer"]), worked
        calculations = re.findall(r"(\d+) (\S) (\d+) = (\d+)", worked)
        for left, sign, right, result in calculations:
            assert SIGNS[sign](int(left), int(right)) == int(result), worked
        steps[kind, len(calculations), reward] += 1
    assert sum(rewards) / len(rows) == pytest.approx(1 - CARELESS, abs=0.03)
    for kind in RESULTS:
        # All are solved in the same number of steps, and no kind is mostly answered well: a slip is what is likely.
        (right,) = (count for (name, _, reward), count in steps.items() if name == kind and reward == 1.0)
        wrong = [count for (name, _, reward), count in steps.items() if name == kind and reward == 0.0]
        assert len(wrong) == 2 and sum(wrong) > 1.5 * right
