"""A task made from code for benchmarks/learning.py: word problems of several steps, a tokenizer and a random Qwen3.

Nothing is downloaded. A grammar writes problems of six kinds with names, things and numbers; an answer works them out
step by step (21 to 55 tokens) and ends with a box. Most answers are those of careless people: their arithmetic is
right, and a slip makes them wrong.
"""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import export_policy
from torchtitan.models.shape.model_args import ModelArgs

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jon", "Kim", "Leo")
THINGS = ("apples", "books", "coins", "eggs", "marbles", "pens", "shells", "stamps", "stones", "tickets")
PLACES = ("box", "bag", "basket", "drawer", "row", "shelf")
PAD, END = "<pad>", "<eos>"
LONGEST_ANSWER = 96

# Of ten worked answers seven are careless, and of those eight have the slip to which their kind of problem tempts.
CARELESS, TEMPTED = 0.7, 0.8


class Step(NamedTuple):
    """One line of a worked answer: `text` has {} where the calculation stands."""

    text: str
    left: int
    sign: str
    right: int

    @property
    def result(self) -> int:
        return CALCULATE[self.sign](self.left, self.right)

    def worked(self) -> str:
        return self.text.format(f"{self.left} {self.sign} {self.right} = {self.result}")

    def mistaken(self) -> Step:
        """With the wrong operation, larger number first, and its right result."""
        sign = {"+": "-", "-": "+", "*": "+", "/": "-"}[self.sign]
        return Step(self.text, max(self.left, self.right), sign, min(self.left, self.right))


CALCULATE: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}
Problem = tuple[str, list[Step]]
"""The question, and the steps of its answer"""


def shopping(dice: random.Random) -> Problem:
    name, thing = dice.choice(NAMES), dice.choice(THINGS)
    count, price = dice.randint(2, 4), dice.randint(2, 5)
    cost = count * price
    paid = cost + dice.randint(1, 6)
    question = (
        f"{name} buys {count} {thing} for {price} euros each and pays with {paid} euros. How many euros are left?"
    )
    steps = [
        Step(f"The {thing} cost {{}} euros.", count, "*", price),
        Step("Then {} euros are left.", paid, "-", cost),
    ]
    return question, steps


def giving(dice: random.Random) -> Problem:
    (first, second), thing = dice.sample(NAMES, 2), dice.choice(THINGS)
    has, gets = dice.randint(3, 9), dice.randint(2, 6)
    total = has + gets
    gives = dice.randint(2, min(6, total - 1))
    question = (
        f"{first} has {has} {thing}, finds {gets} more and gives {gives} of them to {second}. "
        f"How many {thing} has {first} now?"
    )
    steps = [
        Step(f"With those found {first} has {{}} {thing}.", has, "+", gets),
        Step(f"After giving {first} has {{}} {thing}.", total, "-", gives),
    ]
    return question, steps


def storing(dice: random.Random) -> Problem:
    thing, place = dice.choice(THINGS), dice.choice(PLACES)
    places, each, more = dice.randint(2, 5), dice.randint(2, 5), dice.randint(2, 6)
    question = (
        f"Every {place} holds {each} {thing}. There are {places} of them, and {more} {thing} lie beside. "
        f"How many {thing} are there?"
    )
    steps = [
        Step(f"In all of them are {{}} {thing}.", places, "*", each),
        Step(f"With those beside there are {{}} {thing}.", places * each, "+", more),
    ]
    return question, steps


def sharing(dice: random.Random) -> Problem:
    name, thing = dice.choice(NAMES), dice.choice(THINGS)
    children, each, lost = dice.randint(2, 4), dice.randint(2, 5), dice.randint(1, 6)
    shared = children * each
    question = (
        f"{name} had {shared + lost} {thing} and lost {lost}. {children} children share the rest. "
        f"How many {thing} does each of them get?"
    )
    steps = [
        Step(f"There are {{}} {thing} to share.", shared + lost, "-", lost),
        Step(f"Each child gets {{}} {thing}.", shared, "/", children),
    ]
    return question, steps


def comparing(dice: random.Random) -> Problem:
    (first, second), thing = dice.sample(NAMES, 2), dice.choice(THINGS)
    fewer, more = dice.randint(3, 9), dice.randint(2, 6)
    question = (
        f"{first} has {fewer} {thing} and {second} has {more} more than {first}. "
        f"How many {thing} do they have together?"
    )
    steps = [
        Step(f"{second} has {{}} {thing}.", fewer, "+", more),
        Step(f"Together they have {{}} {thing}.", fewer, "+", fewer + more),
    ]
    return question, steps


def travelling(dice: random.Random) -> Problem:
    name = dice.choice(NAMES)
    hours, speed, walked, back = dice.randint(2, 4), dice.randint(2, 5), dice.randint(2, 6), dice.randint(2, 4)
    ridden = hours * speed
    question = (
        f"{name} rides {speed} km an hour for {hours} hours, walks {walked} km more and goes {back} km "
        f"back. How far from the start is {name}?"
    )
    steps = [
        Step("Riding makes {} km.", hours, "*", speed),
        Step("With the walk it is {} km.", ridden, "+", walked),
        Step("Going back leaves {} km.", ridden + walked, "-", back),
    ]
    return question, steps


Answer = tuple[list[Step], int]
"""The steps that are written down, and what is put into the box"""


def stops_early(steps: list[Step]) -> Answer:
    return steps[:-1], steps[-2].result


def wrong_operation(steps: list[Step]) -> Answer:
    last = steps[-1].mistaken()
    return [*steps[:-1], last], last.result


def wrong_number(steps: list[Step]) -> Answer:
    """All steps are right, and the number of the last but one is put into the box."""
    return steps, steps[-2].result


SLIPS: tuple[Callable[[list[Step]], Answer], ...] = (stops_early, wrong_operation, wrong_number)
KINDS: tuple[Callable[[random.Random], Problem], ...] = (shopping, giving, storing, sharing, comparing, travelling)


def answer_carelessly(kind: int, steps: list[Step], dice: random.Random) -> Answer:
    """A wrong answer whose arithmetic is right: mostly with the slip of this kind of problem."""
    tempting = SLIPS[kind % len(SLIPS)]
    others = [slip for slip in SLIPS if slip is not tempting]
    while True:
        written, boxed = (tempting if dice.random() < TEMPTED else dice.choice(others))(steps)
        if boxed != steps[-1].result:  # 4 - 2 is 4 / 2
            return written, boxed


def make_rows(count: int, seed: int) -> list[dict[str, str]]:
    """`count` different problems: rows with prompt, completion (often careless, see CARELESS) and the right answer."""
    dice = random.Random(f"word problems {seed}")
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        kind = dice.randrange(len(KINDS))
        question, steps = KINDS[kind](dice)
        result = steps[-1].result
        careless = dice.random() < CARELESS
        written, boxed = answer_carelessly(kind, steps, dice) if careless else (steps, result)
        worked = " ".join(step.worked() for step in written)
        rows[question] = {
            "prompt": f"{question}\n",
            "completion": f"{worked} The answer is \\boxed{{{boxed}}}",
            "answer": str(result),
        }
    return list(rows.values())


def make_tokenizer(texts: list[str], vocabulary: int, directory: Path) -> int:
    """Byte-level BPE in which every digit is a token of its own, in the files of a Hugging Face tokenizer; its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[PAD, END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD, "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    return int(tokenizer.get_vocab_size())


def make_task(folder: Path, train_rows: int, test_rows: int, layers: int, hidden: int) -> int:
    """train.jsonl, test.jsonl (other problems) and a random policy in `folder`/random; returns its parameters."""
    rows = make_rows(train_rows + test_rows, seed=0)
    for name, part in (("test", rows[:test_rows]), ("train", rows[test_rows:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    size = make_tokenizer([row["prompt"] + row["completion"] for row in rows], 600, folder / "tokenizer")
    args = ModelArgs(
        family="qwen3",
        vocab_size=size,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        eos_token_ids=(1,),
    )
    policy = Decoder(args)
    policy.initialize_weights(seed=0)
    export_policy(policy, folder / "random", assets_from=folder / "tokenizer")
    return args.num_parameters()
