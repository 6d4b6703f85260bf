"""Sums and differences of one-digit numbers from reasoning-gym (chain_sum), with its own verifier as the reward.

train_configs/smollm2_cpu.toml and examples/real_model.py use it. There are only 200 such questions. A model could
remember them, so 128 or 129 are held out, by classes: 3 + 5 and 5 + 3, or 3 - 5 and 5 - 3, are on one side.
"""

import functools
import random
import re

import reasoning_gym

HELD_OUT = 128


@functools.cache
def task(size=1):
    return reasoning_gym.create_dataset("chain_sum", size=size, seed=1, min_terms=2, max_terms=2, max_digits=1)


def split():
    """(training rows, held-out rows), always the same."""
    answers = dict(sorted((entry["question"], entry["answer"]) for entry in task(4000)))
    classes = {}
    for question, answer in answers.items():
        key = tuple(sorted(re.search(r"(\d) ([+-]) (\d)", question).groups()))
        classes.setdefault(key, []).append({"prompt": question, "answer": answer})
    sides = [], []
    for key in sorted(classes, key=lambda key: random.Random(str(key)).random()):
        sides[len(sides[1]) < HELD_OUT].extend(classes[key])
    return sides


def training():
    return split()[0]


def held_out():
    return split()[1]


def verified(completions, answer, **kwargs):
    """1 if reasoning-gym's verifier is fully content with the first line, else 0."""
    lines = [text.strip().split("\n")[0] for text in completions]
    return [float(task().score_answer(line, {"answer": gold}) == 1) for line, gold in zip(lines, answer, strict=True)]
