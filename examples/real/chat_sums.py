"""The questions of sums.py as a chat through the model's own template, with four answered turns before each question.

train_configs/smollm2_chat_cpu.toml uses it.
"""

from examples.real import sums

SHOTS = 4


def turn(row, answered=False):
    asked = [{"role": "user", "content": row["prompt"]}]
    return [*asked, {"role": "assistant", "content": row["answer"]}] if answered else asked


def chats(rows):
    shots = [message for row in sums.training()[:SHOTS] for message in turn(row, answered=True)]
    return [{"prompt": [*shots, *turn(row)], "answer": row["answer"]} for row in rows]


def training():
    return chats(sums.training()[SHOTS:])


def held_out():
    return chats(sums.held_out())


def verified(completions, answer, **kwargs):
    """1 if the reply is the number and nothing else, else 0."""
    return [float(turns[-1]["content"].strip() == gold) for turns, gold in zip(completions, answer, strict=True)]
