"""A task made from code for benchmarks/learning.py: word problems of several steps, a tokenizer and a random Qwen3.

Nothing is downloaded. A grammar writes problems of six kinds with names, things and numbers; an answer works them out
step by step (34 to 55 tokens) and ends with the result in a box.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from torchtitan.models.decoder import Decoder
from torchtitan.models.hf_checkpoint import export_policy
from torchtitan.models.model_args import ModelArgs

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jon", "Kim", "Leo")
THINGS = ("apples", "books", "coins", "eggs", "marbles", "pens", "shells", "stamps", "stones", "tickets")
PLACES = ("box", "bag", "basket", "drawer", "row", "shelf")
PAD, END = "<pad>", "<eos>"
LONGEST_ANSWER = 96

Problem = tuple[str, list[str], int]
"""The question, the steps of its answer, and the result"""


def shopping(dice: random.Random) -> Problem:
    name, thing = dice.choice(NAMES), dice.choice(THINGS)
    count, price = dice.randint(2, 6), dice.randint(2, 6)
    cost = count * price
    paid = cost + dice.randint(1, 12)
    question = (
        f"{name} buys {count} {thing} for {price} euros each and pays with {paid} euros. How many euros are left?"
    )
    steps = [
        f"The {thing} cost {count} * {price} = {cost} euros.",
        f"Then {paid} - {cost} = {paid - cost} euros are left.",
    ]
    return question, steps, paid - cost


def giving(dice: random.Random) -> Problem:
    (first, second), thing = dice.sample(NAMES, 2), dice.choice(THINGS)
    has, gets = dice.randint(3, 20), dice.randint(2, 12)
    both = has + gets
    gives = dice.randint(2, min(12, both - 1))
    question = (
        f"{first} has {has} {thing}, finds {gets} more and gives {gives} of them to {second}. "
        f"How many {thing} has {first} now?"
    )
    steps = [
        f"With those found {first} has {has} + {gets} = {both} {thing}.",
        f"After giving {first} has {both} - {gives} = {both - gives} {thing}.",
    ]
    return question, steps, both - gives


def storing(dice: random.Random) -> Problem:
    thing, place = dice.choice(THINGS), dice.choice(PLACES)
    places, each, more = dice.randint(2, 6), dice.randint(2, 6), dice.randint(2, 12)
    stored = places * each
    question = (
        f"Every {place} holds {each} {thing}. There are {places} of them, and {more} {thing} lie beside. "
        f"How many {thing} are there?"
    )
    steps = [
        f"In all of them are {places} * {each} = {stored} {thing}.",
        f"With those beside there are {stored} + {more} = {stored + more} {thing}.",
    ]
    return question, steps, stored + more


def sharing(dice: random.Random) -> Problem:
    name, thing = dice.choice(NAMES), dice.choice(THINGS)
    children, each, lost = dice.randint(2, 6), dice.randint(2, 6), dice.randint(1, 12)
    shared = children * each
    question = (
        f"{name} had {shared + lost} {thing} and lost {lost}. {children} children share the rest. "
        f"How many {thing} does each of them get?"
    )
    steps = [
        f"There are {shared + lost} - {lost} = {shared} {thing} to share.",
        f"Each child gets {shared} / {children} = {each} {thing}.",
    ]
    return question, steps, each


def comparing(dice: random.Random) -> Problem:
    (first, second), thing = dice.sample(NAMES, 2), dice.choice(THINGS)
    fewer, more = dice.randint(3, 20), dice.randint(2, 12)
    larger = fewer + more
    question = (
        f"{first} has {fewer} {thing} and {second} has {more} more than {first}. "
        f"How many {thing} do they have together?"
    )
    steps = [
        f"{second} has {fewer} + {more} = {larger} {thing}.",
        f"Together they have {fewer} + {larger} = {fewer + larger} {thing}.",
    ]
    return question, steps, fewer + larger


def travelling(dice: random.Random) -> Problem:
    name = dice.choice(NAMES)
    hours, speed, walked, back = (dice.randint(2, 6) for _ in range(4))
    ridden = hours * speed
    question = (
        f"{name} rides {speed} km an hour for {hours} hours, walks {walked} km more and goes {back} km "
        f"back. How far from the start is {name}?"
    )
    steps = [
        f"Riding makes {hours} * {speed} = {ridden} km.",
        f"With the walk it is {ridden} + {walked} = {ridden + walked} km.",
        f"Going back leaves {ridden + walked} - {back} = {ridden + walked - back} km.",
    ]
    return question, steps, ridden + walked - back


KINDS: tuple[Callable[[random.Random], Problem], ...] = (shopping, giving, storing, sharing, comparing, travelling)


def make_rows(count: int, seed: int) -> list[dict[str, str]]:
    """`count` different problems: rows with prompt, completion and answer."""
    dice = random.Random(f"word problems {seed}")
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        question, steps, result = dice.choice(KINDS)(dice)
        worked = " ".join(steps)
        rows[question] = {
            "prompt": f"{question}\n",
            "completion": f"{worked} The answer is \\boxed{{{result}}}",
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
