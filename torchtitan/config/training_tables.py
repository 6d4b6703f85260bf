"""The tables of what is trained: the model, its adapters and its layout over the ranks; batches, optimizer and learning
rate; what only one of the stages has; the objective."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Annotated, ClassVar, Literal

from pydantic.dataclasses import dataclass

from torchtitan.config.engines import engine_names
from torchtitan.config.objectives import DAPO_CLIP, OBJECTIVES, TEACHER_DIVERGENCES, describe
from torchtitan.config.values import (
    TABLE,
    Band,
    BandOrNone,
    Column,
    Count,
    CountOrZero,
    Names,
    NotNegative,
    OnceEach,
    PathText,
    Positive,
    Range,
    ServerUrl,
    Share,
    ShareAboveZero,
    ShareBelowOne,
)

LOSS_TYPES = tuple(OBJECTIVES)
ADVANTAGES = ("group", "rloo", "batch", "reinforce_pp", "reinforce_pp_no_baseline", "opo")
"""The keys of advantages.ADVANTAGE_ESTIMATORS"""
CORRECTIONS = ("truncate", "mask", "icepop", "none")
"""The keys of off_policy.CORRECTIONS"""


@dataclass(config=TABLE)
class Model:
    name: Literal["auto", "llama3", "qwen2", "qwen3", "qwen3_moe", "qwen3_5_text", "gpt_oss"] = "auto"
    """Model family; auto reads it from hf_assets_path/config.json"""

    implementation: Literal["auto", "native", "transformers"] = "auto"
    """Whose layers compute the model: native layers (this package's) support every parallelism and the embedded engine;
    transformers layers (an extra) support FSDP2 and LoRA. auto is native for the families that have it, otherwise
    transformers"""

    flavor: str = ""
    """Shape from the table of public shapes (e.g. 0.6B), for plans and runs without a checkpoint. One in hf_assets_path
    must have this shape, and its config.json says the rest"""

    hf_assets_path: PathText = ""
    """Hugging Face checkpoint directory (config.json, *.safetensors, tokenizer.json), the folder of a run, whose last
    export is used, a model of the Hugging Face Hub such as Qwen/Qwen3-0.6B (or with @revision), which is downloaded
    once, or the name of a checkpoint in torchtitan/assets"""


@dataclass(config=TABLE)
class Lora:
    rank: CountOrZero = 0
    """Rank of the low-rank adapters that are trained instead of the model's weights; 0 trains the weights"""

    alpha: Positive = 32.0
    """The output of an adapter is scaled by alpha / rank"""

    dropout: ShareBelowOne = 0.0
    """Share of an adapter's input that is dropped in training"""

    target_modules: OnceEach = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    """Modules that get adapters; lm_head and embed_tokens are possible too"""

    modules_to_save: OnceEach = field(default_factory=list)
    """Modules that are trained in full beside the adapters, such as lm_head or norm"""

    adapter_path: str = ""
    """Adapter directory in PEFT's format to start from, also for the reference of a KL term; empty starts with new
    adapters, which change nothing yet"""

    base_bits: Literal[4, 16] = 16
    """Bits of the layers' frozen projections: 4 quantises them (QLoRA, NF4), 16 keeps them in training.dtype"""

    @property
    def trains_only_adapters(self) -> bool:
        """Whether only the policy's adapters change, so that a KL term needs no second policy."""
        return self.rank > 0 and not self.modules_to_save


@dataclass(config=TABLE)
class ActivationCheckpoint:
    mode: Literal["none", "selective", "op", "full"] = "none"
    """Which layers recompute their activations in the backward: every second one (selective), all (full), or all that
    keep what attention returned (op)"""


@dataclass(config=TABLE)
class Compile:
    enable: bool = False
    """torch.compile every decoder layer"""

    backend: ClassVar[str] = "inductor"
    """Backend of torch.compile"""


@dataclass(config=TABLE)
class Parallelism:
    data_parallel_replicate_degree: Count = 1
    """Replicas of the sharded model (HSDP)"""

    data_parallel_shard_degree: Annotated[int, Range(1, also=-1)] = -1
    """Ranks that share one copy of the model (FSDP2); -1 uses all remaining ranks"""

    context_parallel_degree: Count = 1
    """Ranks that share the tokens of every micro-batch, for sequences that do not fit one rank; each rank has an equal
    part of the tokens and, in attention, some of the heads. Parameters are sharded over these ranks too"""

    tensor_parallel_degree: Count = 1
    """Ranks that share every layer (tensor parallelism with sequence parallelism)"""

    expert_parallel_degree: Count = 1
    """Ranks, among the shards and their tensor-parallel ranks, that hold different experts of a mixture; tokens travel
    to the experts"""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters after the forward; default frees those of all layers but the last, and keeps what a rank
    holds alone (experts, all of a single rank) until the optimizer step"""

    @property
    def ranks_per_pack(self) -> int:
        """Ranks that work on the same micro-batches."""
        return self.tensor_parallel_degree * self.context_parallel_degree

    def shard_degree(self, ranks: int) -> int:
        """Ranks of so many that share one copy of the policy, besides context and tensor parallelism."""
        if self.data_parallel_shard_degree != -1:
            return self.data_parallel_shard_degree
        return max(1, ranks // (self.data_parallel_replicate_degree * self.ranks_per_pack))


@dataclass(config=TABLE)
class Comm:
    train_timeout_seconds: Count = 120
    """Deadline of every collective; the first one may take half as long again, and at least 300 s"""

    @property
    def init_timeout_seconds(self) -> float:
        """Deadline of the first collective. It is longer than the others because ranks that are started again wait
        here for machines that have not noticed yet, by a collective that fails, that ranks of another are lost."""
        return max(300.0, 1.5 * self.train_timeout_seconds)


@dataclass(config=TABLE)
class Training:
    steps: Count = 100
    """Trained batches; each makes one policy version"""

    global_batch_size: Count = 64
    """Completions per batch over all ranks"""

    seq_len: Annotated[int, Range(2)] = 2048
    """Longest prompt + completion, in tokens"""

    tokens_per_micro_batch: Count = 16384
    """Token budget of one packed micro-batch on one rank; at least seq_len"""

    max_norm: NotNegative = 1.0
    """Largest gradient norm; larger gradients are scaled down to it. 0 turns clipping off"""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the master weights. bfloat16 loses small updates; set mixed_precision_param for float32 master weights
    with products in bfloat16"""

    mixed_precision_param: Literal["auto", "float32", "bfloat16"] = "float32"
    """Type in which FSDP gathers parameters and computes; if not set, it is bfloat16 where the ranks have GPUs. auto is
    bfloat16 also on a processor with AVX512_BF16 or AMX, for models of 50 million parameters or more"""

    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Type in which FSDP reduces gradients"""

    enable_cpu_offload: Literal[False, True, "optimizer"] = False
    """Keep parameters, gradients and optimizer state in host memory (FSDP2 offload), with a reference policy or a
    teacher; optimizer: only what is used once in a batch, the optimizer's state, which is on the device while a step is
    taken, and a reference policy or a teacher"""

    expert_bias_rate: NotNegative = 0.0
    """Mixtures whose routers have a bias: how far each optimizer step moves it towards experts with less than their
    share of the tokens; 0 leaves it unchanged"""

    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Seed of everything random"""

    deterministic: bool = False
    """Use deterministic algorithms only (slower on CUDA)"""

    threads: CountOrZero = 0
    """CPU threads of one trainer rank; 0 derives it from the cores, the ranks and the actors"""


@dataclass(config=TABLE)
class Optimizer:
    name: Literal["AdamW", "Muon", "AdamW8bit"] = "AdamW"
    """AdamW; Muon, for the matrices of layers and of every expert, with AdamW for the rest; or AdamW8bit, whose state
    has eight bits (needs the `bitsandbytes` extra) and is resumed in the same layout of ranks"""

    lr: Share = 1e-6
    """Peak learning rate; Muon's updates are scaled to the size of AdamW's"""

    beta1: ShareBelowOne = 0.9
    """Decay of the first moment"""

    beta2: ShareBelowOne = 0.95
    """Decay of the second moment"""

    weight_decay: NotNegative = 0.0
    """Decoupled weight decay (not applied to norms and biases)"""


@dataclass(config=TABLE)
class LRScheduler:
    warmup_steps: CountOrZero = 0
    """Batches of linear warmup from 0"""

    decay_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after the warmup, over the rest of training.steps"""

    min_lr_factor: Share = 0.0
    """The decay ends at lr × this factor"""


@dataclass(config=TABLE)
class Sft:
    completion_column: Column = "completion"
    """Column of rollout.dataset that holds the completion: text, or chat messages. If the rows have none, the prompt
    column holds whole conversations, and everything that the assistant says in them is trained on"""

    loss_on: Literal["completion", "all"] = "completion"
    """Tokens to train on: those of completions only, or those of prompts as well"""

    epochs: CountOrZero = 0
    """Passes over the rows, which then determine training.steps; 0 uses training.steps"""

    sample: bool = False
    """Also evaluate what the policy samples (pass@k by eval.reward_function), with actors as in GRPO"""


@dataclass(config=TABLE)
class TeacherServer:
    url: ServerUrl = ""
    """A server that holds the teacher's weights and returns its log-probs, such as http://127.0.0.1:8000; empty: the
    ranks compute them"""

    backend: Annotated[str, Names(engine_names(teaching=True))] = "vllm"
    """Engine of that server"""


@dataclass(config=TABLE)
class Distill:
    teacher: PathText = ""
    """Hugging Face checkpoint directory of the teacher (or what else model.hf_assets_path may be), which the
    trainer's ranks hold beside the policy; with a server, only its tokenizer is read"""

    server: TeacherServer = field(default_factory=TeacherServer)

    divergence: Annotated[str, Names(("sampled", *TEACHER_DIVERGENCES))] = "sampled"
    """What brings the policy closer to the teacher: sampled (reverse KL, estimated from the sampled token alone), or
    over the whole vocabulary forward_kl, reverse_kl or jsd (generalised Jensen-Shannon)"""

    jsd_beta: Annotated[float, Range(0, 1, low_open=True, high_open=True)] = 0.5
    """The teacher's share of the mixture of jsd: towards 0 it acts like forward_kl, towards 1 like reverse_kl"""

    hint: str = ""
    """A text that only the teacher reads: a column of rollout.dataset, such as a worked answer, or what is known once a
    group is scored (SDPO): success (another sample of it with a reward of at least 1), feedback (of environment or
    rewards on the sample), or success_or_feedback. Without a teacher, the policy itself is the teacher, as it is at
    every step, or its moving average (grpo.reference_ema_decay)"""

    hint_template: str = "{prompt}\n\n{hint}\n\n"
    """The prompt that the teacher reads instead; of a chat, its last message"""

    coefficient: Positive = 1.0
    """Weight of the divergence from the teacher"""

    add_rewards: bool = False
    """Train on the rewards as well, as GRPO does; otherwise they are only logged"""

    top_k: ClassVar[int] = 20
    """With a server and a divergence over the vocabulary: how many of the teacher's likeliest tokens are requested
    for every position, at most vLLM's max-logprobs; all others count as one"""


@dataclass(config=TABLE)
class GRPO:
    async_weight_update: bool = True
    """true: no step waits for an actor. false: every step waits until all live actors have the new version"""

    group_size: Annotated[int, Range(2)] = 8
    """Completions per prompt"""

    loss_type: Annotated[str, Names(LOSS_TYPES, own_function=True)] = "dapo"
    """Objective (described in docs/algorithms.md), or your own function as package.module:function"""

    loss_normalization: Literal["auto", "token", "sequence", "constant"] = "auto"
    """How tokens are weighted: auto as the objective does, token all equally, sequence by 1 / (sequences × length),
    constant by 1 / (sequences × longest completion)"""

    advantage: Annotated[str, Names(ADVANTAGES, own_function=True)] = "group"
    """Baseline: group (mean of the group), rloo (mean of the others), batch, reinforce_pp (group, then normalised over
    the batch), reinforce_pp_no_baseline (only normalised), opo (mean of the group, weighted by length), or your own
    function as package.module:function"""

    group_filter: str = ""
    """Your own function, as package.module:function, that chooses the scored groups to train on, besides
    drop_zero_variance"""

    recompute_old_log_probs: bool = False
    """Decoupled mode: recompute the proximal policy's log-probs before the first optimizer step of a batch"""

    epsilon_low: Annotated[float, Range(0, 1, also=-1)] = -1.0
    """Lower clip range of the ratio; -1 is the objective's own (docs/algorithms.md): 0.2 for most, 3e-4 for ratios of
    sequences (gspo)"""

    epsilon_high: Annotated[float, Range(0, also=-1)] = -1.0
    """Upper clip range of the ratio, or of loss_type cispo the cap of the importance weight; -1 is the objective's own:
    0.28 for most, 4e-4 for ratios of sequences (gspo), 5 for cispo"""

    delta: Annotated[float, Range(1, low_open=True, also=0)] = 3.0
    """Upper bound of the ratio where the advantage is negative and epsilon_high bounds nothing; 0 turns it off"""

    off_policy_correction: Annotated[str, Names(CORRECTIONS, own_function=True)] = "truncate"
    """Decoupled mode: how π_old/μ weights a token: truncate (capped), mask (0 above the cap), icepop (0 outside a
    band), none, or your own function as package.module:function. Direct mode: mask, icepop and your own function leave
    out tokens whose weight by π/μ is 0; truncate does nothing"""

    importance_cap: Positive = 2.0
    """Cap of truncate and mask, of the weight of loss_type reinforce, and of the ratio that weights the divergence from
    the reference"""

    icepop_band: Band = field(default_factory=lambda: [0.5, 5.0])
    """Least and greatest ratio that icepop keeps"""

    allow_uncorrected: bool = False
    """Allow a run on samples of older policies in which nothing bounds the weight of one"""

    geometric_mask: BandOrNone = field(default_factory=list)
    """Mask sequences whose geometric mean ratio π/μ is outside this band, such as [0.5, 2]; empty masks none"""

    negative_mask_threshold: NotNegative = 0.0
    """Mask sequences with a negative advantage whose mean of log μ/π exceeds this; 0 turns it off"""

    kl_coefficient: NotNegative = 0.0
    """Weight of the KL divergence from the reference policy; 0 loads no reference"""

    reference_ema_decay: ShareBelowOne = 0.0
    """0 keeps the reference policy at the initial weights; otherwise it follows the policy, keeping this share at every
    step"""

    entropy_coefficient: NotNegative = 0.0
    """Weight of the entropy bonus"""

    observation_coefficient: NotNegative = 0.0
    """Weight of the cross-entropy on what tools and environments wrote between the turns, averaged over these tokens of
    a minibatch; it makes the policy predict its environment"""

    entropy_top_share: ShareAboveZero = 1.0
    """Decoupled mode: the policy loss uses only this share of a batch's tokens, those with the highest entropy"""

    routing_replay: bool = False
    """Mixtures of experts: train every token with the experts that the engine used to sample it. Without it, mere
    rounding makes the two choose different experts, and most runs of such models collapse"""

    num_minibatches: Count = 1
    """Optimizer steps per pass over a batch, each on its share of the groups"""

    num_iterations: Count = 1
    """Passes over a batch"""

    scale_rewards: Literal["none", "group", "batch", "mean"] = "none"
    """Divide advantages by the standard deviation of the rewards in the group or batch, or by the group's mean reward
    (MaxRL)"""

    advantage_level: Literal["trajectory", "turn"] = "trajectory"
    """One advantage per episode (trajectory), or one per turn, from the rewards of its step and later ones"""

    reward_aggregation: Literal["sum", "normalize_each"] = "sum"
    """Of several reward functions, sum the rewards and compute advantages of the sum, or take the weighted sum of each
    function's advantages"""

    drop_zero_variance: bool = True
    """Drop (and count) groups whose rewards are all equal, because all their advantages are zero. With
    reward_aggregation = normalize_each, every function's rewards must be equal; with advantage = batch,
    reinforce_pp_no_baseline or your own function, no group is dropped"""

    mask_truncated: bool = False
    """Leave completions that hit the length limit out of the loss"""

    mismatch_kl_stop: NotNegative = 0.0
    """Save a checkpoint and stop the run after a step whose mismatch_kl exceeds this; 0: never"""

    @property
    def has_sequence_ratios(self) -> bool:
        """Whether an importance ratio is one number per sequence, as GSPO has it."""
        return describe(self.loss_type).ratio != "token"

    @property
    def clip_range(self) -> tuple[float, float]:
        """epsilon_low and epsilon_high; -1 is the objective's own."""
        low, high = describe(self.loss_type).clip or DAPO_CLIP
        return (
            low if self.epsilon_low == -1 else self.epsilon_low,
            high if self.epsilon_high == -1 else self.epsilon_high,
        )

    @property
    def largest_weight(self) -> tuple[str, float]:
        """(the key that decides it, the largest weight that the objective gives a token for any ρ); infinity and
        loss_type where nothing is known to bound it."""
        known = describe(self.loss_type)
        if not known.bounded_by:
            return "loss_type", known.largest_weight
        bounds = {
            "delta": self.delta or math.inf,
            "epsilon_high": self.clip_range[1],
            "importance_cap": self.importance_cap,
        }
        return known.bounded_by, bounds[known.bounded_by]
