"""Products of three numbers from reasoning-gym, with a calculator for two: the policy writes its calls in brackets.

    Q: 23 * 45 * 67
    A: [23 * 45] 1035. [1035 * 67] 69345. The answer is 69345.

train_configs/smollm2_tool_cpu.toml uses it. Three questions are answered in every prompt.
"""

import functools
import re

import reasoning_gym

HELD_OUT = 128
SHOTS = ((34, 12, 5), (27, 45, 31), (60, 8, 18))


@functools.cache
def task(size):
    return reasoning_gym.create_dataset(
        "products", size=size, seed=1, min_terms=3, max_terms=3, min_digits=1, max_digits=2
    )


def prompt(question):
    shown = "".join(
        f"Q: {a} * {b} * {c}\nA: [{a} * {b}] {a * b}. [{a * b} * {c}] {a * b * c}. The answer is {a * b * c}.\n\n"
        for a, b, c in SHOTS
    )
    return f"{shown}Q: {question}\nA:"


def rows():
    """All questions, each once."""
    answers = {re.search(r"\d+ \* \d+ \* \d+", entry["question"])[0]: entry["answer"] for entry in task(640)}
    return [{"prompt": prompt(question), "answer": answer} for question, answer in answers.items()]


def training():
    return rows()[HELD_OUT:]


def held_out():
    return rows()[:HELD_OUT]


def multiply(a: int, b: int) -> str:
    """The product of two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return f" {a * b}."


def bracket_calls(text):
    """The calls [a * b] in a turn."""
    return [("multiply", {"a": a, "b": b}) for a, b in re.findall(r"\[(\d{1,6}) \* (\d{1,6})\]", text)]


def verified(completions, answer, **kwargs):
    """1 if the sentence after the calculator's result says the product, else 0."""
    said = (re.search(r"The answer is (\d+)\.\s*$", text) for text in completions)
    return [float(found is not None and found[1] == gold) for found, gold in zip(said, answer, strict=True)]
