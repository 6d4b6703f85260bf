"""What only one of the stages has: supervised fine-tuning, or distillation."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from torchtitan.config.values import TABLE, Column, CountOrZero, NotNegative, PathText, Positive


@dataclass(config=TABLE)
class Sft:
    completion_column: Column = "completion"
    """Column of rollout.dataset that holds what is to be said: text, or chat messages. Where rows have none, the prompt
    column holds whole conversations, and all that the assistant says in them is trained"""

    loss_on: Literal["completion", "all"] = "completion"
    """Tokens that are trained: those of completions, or those of prompts as well"""

    epochs: CountOrZero = 0
    """Passes over the rows, from which training.steps follows; 0: training.steps as it is"""

    sample: bool = False
    """Evaluate by what the policy samples too (pass@k of eval.reward_function), with actors as GRPO has them"""


@dataclass(config=TABLE)
class Distill:
    teacher: PathText = ""
    """Hugging Face checkpoint directory of the teacher (or the folder of a run, whose last export is taken), which the
    trainer's ranks hold beside the policy; with teacher_url its tokenizer alone is read"""

    teacher_url: str = ""
    """A server that has the teacher's weights and gives its log-probs, such as http://127.0.0.1:8000; empty: the ranks
    do"""

    teacher_backend: Literal["vllm", "sglang", "embedded"] = "vllm"
    """What the server runs"""

    teacher_timeout_s: Positive = 120.0
    """Deadline of a request to the server, of which three are tried"""

    coefficient: NotNegative = 1.0
    """Weight of the reverse KL to the teacher"""

    add_rewards: bool = False
    """Train on the rewards as well, as GRPO does; without they are only written down"""
