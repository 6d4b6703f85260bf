"""Batches, optimizer and learning rate, and what only one of the stages has."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic.dataclasses import dataclass

from torchtitan.config.values import (
    TABLE,
    Column,
    Count,
    CountOrZero,
    NotNegative,
    PathText,
    Positive,
    Range,
    Share,
    ShareBelowOne,
)


@dataclass(config=TABLE)
class Training:
    steps: Count = 100
    """Trained batches; each makes one policy version"""

    local_batch_size: Count = 64
    """Completions per data-parallel rank and batch, where global_batch_size is -1"""

    global_batch_size: Annotated[int, Range(1, also=-1)] = -1
    """Completions per batch over all ranks; -1 is local_batch_size × data-parallel degree"""

    seq_len: Annotated[int, Range(2)] = 2048
    """Longest prompt + completion, in tokens"""

    tokens_per_micro_batch: Count = 16384
    """Token budget of one packed micro-batch on one rank; at least seq_len"""

    max_norm: NotNegative = 1.0
    """Gradient norm above which gradients are scaled down; 0 turns clipping off"""

    max_skipped_steps: Count = 5
    """The run stops after this many consecutive optimizer steps with a non-finite loss or gradient"""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the master weights. bfloat16 loses small updates: for float32 masters with products in bfloat16 set
    mixed_precision_param"""

    mixed_precision_param: Literal["float32", "bfloat16"] = "float32"
    """Type in which FSDP gathers parameters and computes; not named, it is bfloat16 where the ranks have GPUs"""

    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Type in which FSDP reduces gradients"""

    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory (FSDP2 offload)"""

    expert_bias_rate: NotNegative = 0.0
    """Mixtures whose routers have a bias: how far an optimizer step moves it towards experts with less than their share
    of the tokens; 0 leaves it as it is"""

    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Seed of everything that is random"""

    deterministic: bool = False
    """Use deterministic algorithms only (slower on CUDA)"""

    threads: CountOrZero = 0
    """CPU threads of one trainer rank; 0 decides from the cores, the ranks and the actors"""


@dataclass(config=TABLE)
class Optimizer:
    name: Literal["AdamW", "Muon", "AdamW8bit"] = "AdamW"
    """AdamW; Muon for the matrices of layers and AdamW for the rest; or AdamW with its state in eight bits (needs the
    `bitsandbytes` extra). The last two with one trainer rank only"""

    lr: Share = 1e-6
    """Peak learning rate; Muon's updates are scaled to the size of AdamW's"""

    beta1: ShareBelowOne = 0.9
    """Decay of the first moment"""

    beta2: ShareBelowOne = 0.95
    """Decay of the second moment"""

    eps: Positive = 1e-8
    """Term added to the denominator"""

    weight_decay: NotNegative = 0.0
    """Decoupled weight decay (not applied to norms and biases)"""

    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """Implementation of AdamW's update"""


@dataclass(config=TABLE)
class LRScheduler:
    warmup_steps: CountOrZero = 0
    """Batches of linear warmup from 0"""

    decay_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay that follows the warmup, over the rest of training.steps"""

    min_lr_factor: Share = 0.0
    """The decay ends at lr × this factor"""


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
