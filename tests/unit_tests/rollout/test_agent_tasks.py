"""The built-in tasks of several turns, and the tokens between two turns."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.make_debug_checkpoint import INDEX, WARM_STARTS, batches
from tests.unit_tests.rollout.test_tokenizer import write_tokenizer
from torchtitan.errors import UserError
from torchtitan.rollout.conversation.tokenizer import ChatRenderer, Tokenizer
from torchtitan.rollout.environments import builtin_environments as builtin
from torchtitan.rollout.environments.builtin_environments import GUESSES, LARGEST, Guess, guess_rows

numbers = random.Random(0)
Player = Callable[[int, int], int]


@pytest.mark.parametrize(
    ("player", "wins"),
    [
        (lambda low, high: (low + high + 1) // 2, 1.0),
        (lambda low, high: numbers.randint(low, high), 0.71),
        (lambda low, high: numbers.randint(0, LARGEST), 0.175),
    ],
)
def test_players_of_the_guessing_game(player: Player, wins: float) -> None:
    """Shares of games won as they follow from the rules: bisection, play in line with the answers, and at random."""
    game, won, games = Guess(), 0, 4000
    for number in range(games):
        game.reset(**{name: value for name, value in guess_rows()[number % 32].items() if name != "prompt"})
        low, high, rewards = 0, LARGEST, []
        for turn in range(GUESSES):
            guess = player(low, high)
            answer, reward, over = game.step(f"{guess:02d}.")
            rewards.append(reward)
            assert over == (answer == "=" or turn == GUESSES - 1)
            if over:
                break
            low, high = (low, min(high, guess - 1)) if answer == "<" else (max(low, guess + 1), high)
        won += answer == "="
        # A win alone passes.
        assert (sum(rewards) >= 1) == (answer == "=")
    assert won / games == pytest.approx(wins, abs=0.03)
    game.reset(secret=3)
    assert [game.step(text)[0] for text in ("3.", "", "٣٣.", "+3.", "03")] == ["!", "!", "!", "!", "="]


def test_a_sum_must_be_copied() -> None:
    def judge(*texts: str) -> list[float]:
        count = len(texts)
        return builtin.right(completions=texts, answer=["06912"] * count, finish_reasons=["stop"] * count)

    assert builtin.bracket_calls("[1234+5678]") == [("add", {"a": "1234", "b": "5678"})]
    result = builtin.add(1234, 5678)
    assert judge(f"[1234+5678]{result}06912", f"[1234+5678]{result}", "06912", f"[1234+5678]{result}0691") == [
        1, 0, 1, 0,
    ]  # fmt: skip
    assert builtin.right(completions=["=06912"], answer=["06912"], finish_reasons=["length"]) == [0.0]


@pytest.mark.parametrize("task", sorted(WARM_STARTS))
def test_warm_starts_imitate_only_what_a_player_writes(task: str) -> None:
    for play, _ in WARM_STARTS[task]:
        tokens, written = next(batches(play, 0))
        read = {INDEX[symbol] for symbol in {"guess": "<>?", "calculator": "=", "mix": "<>?="}[task]}
        assert not read & set(tokens[written].tolist()) and tokens.shape[1] <= 33
        assert read <= set(tokens[~written].tolist())


def test_a_template_that_rewrites_turns_is_refused(tmp_path: Path) -> None:
    forgetful = "{% for m in messages %}{{ m.content if loop.last else '' }}<|im_end|>{% endfor %}"
    renderer = ChatRenderer(Tokenizer(write_tokenizer(tmp_path, chat_template=forgetful)))
    with pytest.raises(UserError, match="keeps its prefixes"):
        renderer.following([0], [{"role": "user", "content": "y"}])
