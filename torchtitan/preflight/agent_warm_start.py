"""Warm starts of the built-in agent tasks: a tiny policy imitates clumsy play, so that GRPO has something to improve.

What a player reads (prompts, observations) is not imitated, only what it writes.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from torchtitan.models.decoder import Decoder
from torchtitan.models.model_args import ModelArgs
from torchtitan.rollout.environments import calculator, guess

SYMBOLS = ["<pad>", "<eos>", *"0123456789", *"+=[]<>?!.", "<bos>", "<unk>"]
PAD, EOS = 0, 1
INDEX = {symbol: i for i, symbol in enumerate(SYMBOLS)}
ROWS = 128

Play = list[tuple[str, bool]]
"""Texts, and whether the player wrote them"""


@dataclass(frozen=True)
class WarmStart:
    """How a task's policy is made: so many steps on such plays."""

    play: Callable[[random.Random], Play]
    steps: int


def policy_args() -> ModelArgs:
    """Four Qwen3 layers, 330k parameters."""
    return ModelArgs(
        family="qwen3",
        vocab_size=len(SYMBOLS),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        eos_token_ids=(EOS,),
    )


def guess_play(numbers: random.Random) -> Play:
    """A game of a player who looks at the answers only half of the time."""
    game = guess.Guess()
    secret = numbers.randint(0, guess.LARGEST)
    game.reset(secret)
    play: Play = [("?", False)]
    low, high, over = 0, guess.LARGEST, False
    while not over:
        heeds = numbers.random() < 0.5
        number = numbers.randint(low, high) if heeds else numbers.randint(0, guess.LARGEST)
        text = f"{number:02d}{guess.END_OF_GUESS}"
        answer, _, over = game.step(text)
        low = max(low, number + 1) if answer == ">" else low
        high = min(high, number - 1) if answer == "<" else high
        play += [(text, True), (answer, False)]
    return play[:-1]


def calculator_play(numbers: random.Random) -> Play:
    """A player who asks the calculator in one of ten sums and makes up the answers of the others."""
    row = numbers.choice(_sums())
    if numbers.random() >= 0.1:
        return [(row["prompt"], False), (f"{numbers.randrange(20000):05d}", True), ("<eos>", True)]
    a, b = row["prompt"].rstrip("=").split("+")
    result = calculator.add(int(a), int(b))
    return [(row["prompt"], False), (f"[{a}+{b}]", True), (result, False), (row["answer"], True), ("<eos>", True)]


@functools.cache
def _sums() -> list[dict[str, str]]:
    return calculator.rows()[: calculator.ROWS // 2]


WARM_STARTS = {
    "guess": WarmStart(guess_play, steps=450),
    "calculator": WarmStart(calculator_play, steps=450),
}


def batches(play: Callable[[random.Random], Play], seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches of plays: tokens [ROWS, longest] and what the player wrote of them (bool)."""
    numbers = random.Random(seed)
    while True:
        rows, written = [], []
        for _ in range(ROWS):
            parts = [
                (INDEX[symbol], own) for text, own in play(numbers) for symbol in ([text] if text in INDEX else text)
            ]
            rows.append(torch.tensor([token for token, _ in parts]))
            written.append(torch.tensor([own for _, own in parts]))
        pad = torch.nn.utils.rnn.pad_sequence
        yield pad(rows, batch_first=True, padding_value=PAD), pad(written, batch_first=True, padding_value=False)


def warm_start(policy: Decoder, task: str, seed: int) -> tuple[int, float]:
    """Supervised steps; returns how many, and the average probability of a whole play."""
    how = WARM_STARTS[task]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    likely = 0.0
    for tokens, written in itertools.islice(batches(how.play, seed), how.steps):
        logits = policy.logits(tokens[:, :-1])
        loss = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none") * written[:, 1:]
        likely = 0.9 * likely + 0.1 * loss.detach().sum(1).neg().exp().mean().item()
        (loss.sum() / written.sum()).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return how.steps, likely
