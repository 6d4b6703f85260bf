"""The tables of what is trained: the model, its adapters and its layout over the ranks; batches, optimizer and learning
rate; what only one of the stages has; the objective."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic.dataclasses import dataclass

from torchtitan.config.values import (
    TABLE,
    Column,
    Count,
    CountOrZero,
    Names,
    NotNegative,
    PathText,
    Positive,
    Range,
    Share,
    ShareAboveZero,
    ShareBelowOne,
)

LOSS_TYPES = (
    "grpo", "dapo", "bnpo", "dr_grpo", "gspo", "gspo_token", "gmpo", "dppo", "cispo", "sapo", "reinforce",
)  # fmt: skip
"""The keys of objectives.OBJECTIVES"""
ADVANTAGES = ("group", "rloo", "batch", "reinforce_pp", "reinforce_pp_no_baseline", "opo")
"""The keys of advantages.ESTIMATORS"""
CORRECTIONS = ("truncate", "mask", "icepop", "none")
"""The keys of off_policy.CORRECTIONS"""
DIVERGENCES = ("k1", "k2", "k3")
"""The keys of divergence.ESTIMATORS"""


@dataclass(config=TABLE)
class Model:
    name: Literal["auto", "llama3", "qwen2", "qwen3", "qwen3_moe", "gpt_oss"] = "auto"
    """Model family; auto reads it from hf_assets_path/config.json"""

    implementation: Literal["auto", "native", "transformers"] = "auto"
    """Whose layers compute the model: native are this program's, which have all parallelisms and the embedded engine;
    transformers' (its package is an extra) have FSDP2 and LoRA. auto: native where the family is, else transformers"""

    flavor: str = ""
    """Shape from the table of public shapes (e.g. 0.6B); empty reads it from hf_assets_path/config.json"""

    hf_assets_path: PathText = ""
    """Hugging Face checkpoint directory (config.json, *.safetensors, tokenizer.json), or the folder of a run, whose
    last export is taken"""

    logprob_head: Literal["one_pass", "two_pass", "full"] = "one_pass"
    """Log-probs without full logits, with gradients formed in the forward where the objective is separable by tokens
    (else two_pass), or always two_pass; full holds all logits, to compare with"""

    logprob_head_budget_mb: CountOrZero = 0
    """Memory for logits at a time, in MiB; a GPU takes as much again beside it. Not named, it is 1024 where the ranks
    have GPUs; 0 is 1024 for tensors on a GPU, else an eighth of the head's gradients, 8 to 36"""


@dataclass(config=TABLE)
class Lora:
    rank: CountOrZero = 0
    """Columns of the low-rank adapters that are trained in place of the model's weights; 0 trains the weights"""

    alpha: Positive = 32.0
    """An adapter counts alpha / rank times"""

    dropout: ShareBelowOne = 0.0
    """Share of an adapter's input that is left out while training"""

    target_modules: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    """Modules that get adapters; lm_head and embed_tokens are possible too"""

    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained whole beside the adapters, such as lm_head or norm"""

    adapter_path: str = ""
    """Adapter directory in PEFT's format to start from; empty starts with adapters that change nothing"""

    base_bits: Literal[4, 16] = 16
    """Bits of the layers' frozen projections: 4 holds them quantised (QLoRA, NF4), 16 in training.dtype"""


@dataclass(config=TABLE)
class ActivationCheckpoint:
    mode: Literal["none", "selective", "full"] = "none"
    """Which layers recompute their activations in the backward"""

    selective_ac_option: Count = 2
    """With selective: every n-th layer is checkpointed"""


@dataclass(config=TABLE)
class Compile:
    enable: bool = False
    """torch.compile every decoder layer"""

    backend: str = "inductor"
    """Backend of torch.compile"""


@dataclass(config=TABLE)
class Parallelism:
    data_parallel_replicate_degree: Count = 1
    """Replicas of the sharded model (HSDP)"""

    data_parallel_shard_degree: Annotated[int, Range(1, also=-1)] = -1
    """Ranks that share one copy of the model (FSDP2); -1 takes the ranks that are left"""

    context_parallel_degree: Count = 1
    """Ranks that share the tokens of every micro-batch, for sequences that do not fit one rank; each rank has an equal
    part of the tokens, and in attention some of the heads. Parameters are sharded over them, too"""

    tensor_parallel_degree: Count = 1
    """Ranks that share every layer (tensor parallelism with sequence parallelism)"""

    expert_parallel_degree: Count = 1
    """Ranks, among the shards and their tensor-parallel ranks, that have different experts of a mixture: tokens travel
    to the experts"""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters after the forward; default does so for all layers but the last"""

    fsdp_reduce_gradients: Literal["micro_batch", "optimizer_step"] = "micro_batch"
    """Add gradients up over the ranks after every micro-batch, or once per optimizer step: less communication for the
    memory of the whole model's gradients on each rank, where micro-batches add up in training.mixed_precision_reduce"""


@dataclass(config=TABLE)
class Comm:
    init_timeout_seconds: Count = 300
    """Deadline of the first collective"""

    train_timeout_seconds: Count = 120
    """Deadline of every later collective"""

    interface: str = ""
    """Network interface of the ranks on every machine, such as ib0 (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); empty:
    gloo takes the one that leads to rank 0, NCCL chooses by itself"""


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


@dataclass(config=TABLE)
class GRPO:
    async_weight_update: bool = True
    """true: no step waits for an actor. false: every step waits until all live actors have the new version"""

    group_size: Annotated[int, Range(2)] = 8
    """Completions per prompt"""

    loss_type: Annotated[str, Names(LOSS_TYPES, own_function=True)] = "dapo"
    """Objective: grpo, dapo, bnpo, dr_grpo, gspo, gspo_token, gmpo, dppo, cispo, sapo or reinforce, or one's own as
    package.module:function"""

    loss_normalization: Literal["auto", "token", "sequence", "constant"] = "auto"
    """How tokens are weighted: as the objective does, all alike, by sequence, or by sequences × longest completion"""

    importance_level: Literal["auto", "token", "sequence", "sequence_token"] = "auto"
    """Importance ratio of every token, one per sequence, or of that value with every token's own gradient; auto is what
    the objective uses"""

    advantage: Annotated[str, Names(ADVANTAGES, own_function=True)] = "group"
    """Baseline: group (mean of the group), rloo (mean of the others), batch, reinforce_pp (group, then normalised over
    the batch), reinforce_pp_no_baseline (only normalised), opo (mean of the group by length), or one's own as
    package.module:function"""

    group_filter: str = ""
    """Own function as package.module:function: which scored groups are trained on, besides drop_zero_variance"""

    recompute_old_log_probs: bool = False
    """Decoupled mode: the proximal policy is recomputed before the first optimizer step of a batch"""

    epsilon_low: Annotated[float, Range(0, 1, also=-1)] = -1.0
    """Lower clip range of the ratio; -1 is 0.2, 3e-4 where a ratio is a sequence's (gspo), 0.33 for gmpo"""

    epsilon_high: Annotated[float, Range(0, also=-1)] = -1.0
    """Upper clip range of the ratio; -1 is 0.28, 4e-4 where a ratio is a sequence's (gspo), 0.49 for gmpo, 0.2 for
    dppo, where both bound the change of the token's probability"""

    delta: Annotated[float, Range(1, low_open=True, also=0)] = 3.0
    """Upper bound of the ratio where the advantage is negative, which epsilon_high does not bound; 0 turns it off"""

    off_policy_correction: Annotated[str, Names(CORRECTIONS, own_function=True)] = "truncate"
    """Decoupled mode: weight of a token by π_old/μ: truncate (cap), mask (0 above the cap), icepop (0 outside of a
    band), none, or one's own as package.module:function. Direct mode: mask, icepop and one's own leave out tokens of
    weight 0, by π/μ; truncate does nothing"""

    importance_cap: Positive = 2.0
    """Cap of truncate and mask, of the weight of loss_type reinforce, and of kl_ratio_correction"""

    icepop_low: NotNegative = 0.5
    """Lower end of the icepop band"""

    icepop_high: Positive = 5.0
    """Upper end of the icepop band"""

    cispo_cap: Positive = 5.0
    """Cap of the importance weight of loss_type cispo"""

    sapo_temperature_positive: Positive = 1.0
    """Steepness of loss_type sapo's gate where the advantage is positive"""

    sapo_temperature_negative: Positive = 1.05
    """Steepness of loss_type sapo's gate where the advantage is negative"""

    allow_uncorrected: bool = False
    """Start an asynchronous run although nothing bounds how far off policy a sample counts"""

    geometric_mask_low: Share = 0.0
    """Sequences whose geometric mean ratio π/μ lies below are masked; 0 turns it off"""

    geometric_mask_high: Annotated[float, Range(1, also=0)] = 0.0
    """Sequences whose geometric mean ratio π/μ lies above are masked; 0 turns it off"""

    product_mask_low: Share = 0.0
    """Sequences whose product of ratios lies below are masked (hard on long answers); 0 turns it off"""

    product_mask_high: Annotated[float, Range(1, also=0)] = 0.0
    """Sequences whose product of ratios lies above are masked (hard on long answers); 0 turns it off"""

    negative_mask_threshold: NotNegative = 0.0
    """Sequences with a negative advantage are masked where the mean of log μ/π exceeds this; 0 turns it off"""

    kl_coefficient: NotNegative = 0.0
    """Weight of the divergence from the reference policy; 0 loads none"""

    kl_estimator: Annotated[str, Names(DIVERGENCES)] = "k3"
    """Per-token estimate of that divergence: k1, k2 or k3"""

    kl_ratio_correction: bool = True
    """Weight the divergence by min(π/μ, importance_cap): the gradient is that of the KL, off policy too"""

    reference_ema_decay: ShareBelowOne = 0.0
    """Reference policy: 0 keeps the initial weights; else it follows the policy, keeping this share at every sync"""

    reference_sync_interval: Count = 1
    """Steps between two syncs of a reference policy that follows"""

    reference_cpu_offload: bool = False
    """Keep the reference policy's weights in host memory"""

    entropy_coefficient: NotNegative = 0.0
    """Weight of the entropy bonus"""

    entropy_top_share: ShareAboveZero = 1.0
    """Decoupled mode: only this share of a batch's tokens, those of highest entropy, enters the policy loss"""

    routing_replay: bool = False
    """Mixtures of experts: train every token with the experts that the engine has sampled it with. Without, the two
    choose otherwise for what is mere rounding, and most runs of such models collapse"""

    num_minibatches: Count = 1
    """Optimizer steps per pass over a batch, each on its share of the groups"""

    num_iterations: Count = 1
    """Passes over a batch"""

    scale_rewards: Literal["none", "group", "batch", "mean"] = "none"
    """Divide advantages by the standard deviation of the rewards in the group or batch, or by the group's mean reward
    (MaxRL)"""

    advantage_level: Literal["trajectory", "turn"] = "trajectory"
    """One advantage for an episode; or one for each turn, from the rewards that its steps have still brought"""

    reward_aggregation: Literal["sum", "normalize_each"] = "sum"
    """Several reward functions: sum, then advantages; or the advantages of each, then their weighted sum"""

    drop_zero_variance: bool = True
    """Drop groups whose rewards are all equal, so that every advantage is zero (counted). With advantage = batch,
    reinforce_pp_no_baseline or one's own none is;
    with reward_aggregation = normalize_each, those in which every function's rewards are equal"""

    mask_truncated: bool = False
    """Leave completions that hit the length limit out of the loss"""

    mismatch_kl_alarm: NotNegative = 0.1
    """Warn when the trainer's log-probs diverge from the engine's by more than this and staleness explain; 0: never"""

    mismatch_kl_stop: NotNegative = 0.0
    """Save a checkpoint and stop the run after a step whose mismatch_kl is above; 0: never"""
