"""How often a letter appears in a few words: reasoning-gym's letter_counting as a chat, with four answered questions.

train_configs/smollm2_chat_cpu.toml uses it. The turns go through the model's own chat template.
"""

import functools

import reasoning_gym

SHOTS = 4
HELD_OUT = 128


@functools.cache
def task():
    return reasoning_gym.create_dataset("letter_counting", size=640, seed=1, min_words=2, max_words=4)


def turn(entry, answered=False):
    asked = [{"role": "user", "content": entry["question"]}]
    return [*asked, {"role": "assistant", "content": entry["answer"]}] if answered else asked


def rows():
    """All questions but the answered ones, each once."""
    entries = [task()[index] for index in range(640)]
    shots = [message for entry in entries[:SHOTS] for message in turn(entry, answered=True)]
    distinct = {entry["question"]: entry for entry in entries}
    rest = [
        entry for question, entry in distinct.items() if question not in {one["question"] for one in entries[:SHOTS]}
    ]
    return [{"prompt": [*shots, *turn(entry)], "answer": entry["answer"]} for entry in rest]


def training():
    return rows()[HELD_OUT:]


def held_out():
    return rows()[:HELD_OUT]


def verified(completions, answer, **kwargs):
    """1 if the reply is the number and nothing else, else 0."""
    return [float(turns[-1]["content"].strip() == gold) for turns, gold in zip(completions, answer, strict=True)]
