"""The configuration of a job: one dataclass per TOML table.

Names follow torchtitan 0.2 where it has them. The string under a field is its documentation; it ends up in
``docs/config.md`` and in ``--help``. Keep this module free of heavy imports: configuration errors must be quick.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class Job:
    config_file: str = ""
    """TOML file to read; command-line overrides come on top"""

    dump_folder: str = "./outputs"
    """Every launch writes to a fresh folder {dump_folder}/{name}-{time}, and `latest` links to it"""

    name: str = "grpo"
    """Name of the job, first part of its run folder's name"""

    description: str = ""
    """One line about the job, printed at the start and in the report"""


@dataclass
class Profiling:
    enable_profiling: bool = False
    """Record torch profiler traces"""

    save_traces_folder: str = "profile_traces"
    """Folder for the traces, inside the run folder"""

    profile_freq: int = 10
    """Steps between two traces"""


@dataclass
class Metrics:
    log_freq: int = 1
    """Steps between two console lines (metrics.jsonl always has one object per step)"""

    console: Literal["auto", "rich", "plain"] = "auto"
    """Live display, or one line per step; auto takes rich on a terminal"""

    enable_tensorboard: bool = True
    """Write TensorBoard event files"""

    save_tb_folder: str = "tb"
    """Folder for TensorBoard event files, inside the run folder"""

    enable_wandb: bool = False
    """Log to Weights & Biases (needs the `wandb` extra; WANDB_MODE=offline works)"""

    completions_per_step: int = 16
    """Completions written to completions.jsonl per step; -1 for all"""


@dataclass
class Model:
    name: Literal["auto", "llama3", "qwen2", "qwen3"] = "auto"
    """Model family; auto reads it from hf_assets_path/config.json"""

    flavor: str = ""
    """Shape from the table of public shapes (e.g. 0.6B); empty reads it from hf_assets_path/config.json"""

    hf_assets_path: str = ""
    """Hugging Face checkpoint directory: config.json, *.safetensors, tokenizer.json"""

    logprob_head: Literal["one_pass", "two_pass", "full"] = "one_pass"
    """Log-probs without full logits, with gradients formed in the forward where the objective is separable by tokens
    (else two_pass), or always two_pass; full holds all logits, to compare with"""

    logprob_head_budget_mb: int = 0
    """Memory for logits at a time, in MiB; more is faster on a GPU. 0: an eighth of the head's gradients, 8 to 36"""


@dataclass
class Lora:
    rank: int = 0
    """Columns of the low-rank adapters that are trained in place of the model's weights; 0 trains the weights"""

    alpha: float = 32.0
    """An adapter counts alpha / rank times"""

    dropout: float = 0.0
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


@dataclass
class Optimizer:
    name: Literal["AdamW"] = "AdamW"
    """Optimizer"""

    lr: float = 1e-6
    """Peak learning rate"""

    beta1: float = 0.9
    """Decay of the first moment"""

    beta2: float = 0.95
    """Decay of the second moment"""

    eps: float = 1e-8
    """Term added to the denominator"""

    weight_decay: float = 0.0
    """Decoupled weight decay (not applied to norms and biases)"""

    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """Implementation of the update"""


@dataclass
class LRScheduler:
    warmup_steps: int = 0
    """Batches of linear warmup from 0"""

    decay_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay that follows the warmup, over the rest of training.steps"""

    min_lr_factor: float = 0.0
    """The decay ends at lr × this factor"""


@dataclass
class Training:
    steps: int = 100
    """Trained batches; each makes one policy version"""

    local_batch_size: int = 64
    """Completions per data-parallel rank and batch, where global_batch_size is -1"""

    global_batch_size: int = -1
    """Completions per batch over all ranks; -1 is local_batch_size × data-parallel degree"""

    seq_len: int = 2048
    """Longest prompt + completion, in tokens"""

    tokens_per_micro_batch: int = 16384
    """Token budget of one packed micro-batch on one rank; at least seq_len"""

    max_norm: float = 1.0
    """Gradient norm above which gradients are scaled down; 0 turns clipping off"""

    max_skipped_steps: int = 5
    """The run stops after this many consecutive optimizer steps with a non-finite loss or gradient"""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the master weights"""

    mixed_precision_param: Literal["float32", "bfloat16"] = "float32"
    """Type in which FSDP gathers parameters and computes"""

    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Type in which FSDP reduces gradients"""

    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory (FSDP2 offload)"""

    seed: int = 0
    """Seed of everything that is random"""

    deterministic: bool = False
    """Use deterministic algorithms only (slower on CUDA)"""

    threads: int = 0
    """CPU threads of one trainer rank; 0 decides from the cores, the ranks and the actors"""


@dataclass
class Parallelism:
    data_parallel_replicate_degree: int = 1
    """Replicas of the sharded model (HSDP)"""

    data_parallel_shard_degree: int = -1
    """Ranks that share one copy of the model (FSDP2); -1 takes the ranks that are left"""

    tensor_parallel_degree: int = 1
    """Ranks that share every layer (tensor parallelism with sequence parallelism)"""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters after the forward; default does so for all layers but the last"""

    fsdp_reduce_gradients: Literal["micro_batch", "optimizer_step"] = "micro_batch"
    """Add gradients up over the ranks after every micro-batch, or once per optimizer step: less communication for the
    memory of the whole model's gradients on each rank, where micro-batches add up in training.mixed_precision_reduce"""


@dataclass
class ActivationCheckpoint:
    mode: Literal["none", "selective", "full"] = "none"
    """Which layers recompute their activations in the backward"""

    selective_ac_option: int = 2
    """With selective: every n-th layer is checkpointed"""


@dataclass
class Compile:
    enable: bool = False
    """torch.compile every decoder layer"""

    backend: str = "inductor"
    """Backend of torch.compile"""


@dataclass
class Comm:
    init_timeout_seconds: int = 300
    """Deadline of the first collective"""

    train_timeout_seconds: int = 120
    """Deadline of every later collective"""


@dataclass
class Checkpoint:
    enable: bool = False
    """Write checkpoints"""

    folder: str = "checkpoint"
    """Folder of the checkpoints, inside the run folder"""

    interval: int = 50
    """Steps between two checkpoints"""

    async_mode: Literal["disabled", "async"] = "disabled"
    """Write in the background"""

    keep_latest_k: int = 3
    """Checkpoints that are kept; 0 keeps all"""

    resume: str = ""
    """Run folder to resume from (its latest whole checkpoint), or `latest`; the run continues in that folder"""

    load_step: int = -1
    """With resume: the step to load; -1 is the latest whole one"""

    last_save_in_hf: bool = True
    """Export a Hugging Face checkpoint directory at the end (also on demand: SIGUSR1)"""

    save_deadline_s: float = 60.0
    """After SIGTERM or SIGINT the run saves and exits within this time"""


@dataclass
class GRPO:
    async_weight_update: bool = True
    """true: no step waits for an actor. false: every step waits until all live actors have the new version"""

    group_size: int = 8
    """Completions per prompt"""

    loss_type: str = "dapo"
    """Objective: grpo, dapo, bnpo, dr_grpo, gspo, cispo, sapo or reinforce, or one's own as package.module:function"""

    loss_normalization: Literal["auto", "token", "sequence", "constant"] = "auto"
    """How tokens are weighted: as the objective does, all alike, by sequence, or by sequences × longest completion"""

    importance_level: Literal["auto", "token", "sequence"] = "auto"
    """Importance ratio of every token or one per sequence; auto is what the objective uses"""

    advantage: str = "group"
    """Baseline: group (mean of the group), rloo (mean of the others), batch, or reinforce_pp (batch-normalised)"""

    recompute_old_log_probs: bool = False
    """Decoupled mode: the proximal policy is recomputed before the first optimizer step of a batch"""

    epsilon_low: float = 0.2
    """Lower clip range of the ratio"""

    epsilon_high: float = 0.28
    """Upper clip range of the ratio"""

    delta: float = 0.0
    """Upper bound of the ratio also where the advantage is negative (two-sided clip); 0 turns it off"""

    off_policy_correction: str = "truncate"
    """Decoupled mode: weight of a token by π_old/μ: truncate (cap), mask (0 above the cap), icepop (0 outside of a
    band) or none. Direct mode: mask and icepop mask by π/μ, truncate does nothing"""

    importance_cap: float = 2.0
    """Cap of truncate and mask, and of the weight of loss_type reinforce"""

    icepop_low: float = 0.5
    """Lower end of the icepop band"""

    icepop_high: float = 5.0
    """Upper end of the icepop band"""

    cispo_cap: float = 5.0
    """Cap of the importance weight of loss_type cispo"""

    sapo_temperature_positive: float = 1.0
    """Steepness of loss_type sapo's gate where the advantage is positive"""

    sapo_temperature_negative: float = 1.05
    """Steepness of loss_type sapo's gate where the advantage is negative"""

    allow_uncorrected: bool = False
    """Start an asynchronous run although nothing bounds how far off policy a sample counts"""

    geometric_mask_low: float = 0.5
    """Sequences whose geometric mean ratio π/μ lies below are masked; 0 turns it off"""

    geometric_mask_high: float = 2.0
    """Sequences whose geometric mean ratio π/μ lies above are masked; 0 turns it off"""

    product_mask_low: float = 0.0
    """Sequences whose product of ratios lies below are masked (hard on long answers); 0 turns it off"""

    product_mask_high: float = 0.0
    """Sequences whose product of ratios lies above are masked (hard on long answers); 0 turns it off"""

    negative_mask_threshold: float = 0.0
    """Sequences with a negative advantage are masked where the mean of log μ/π exceeds this; 0 turns it off"""

    kl_coefficient: float = 0.0
    """Weight of the divergence from the reference policy; 0 loads none"""

    kl_estimator: str = "k3"
    """Per-token estimate of that divergence: k1, k2 or k3"""

    kl_ratio_correction: bool = True
    """Multiply the divergence by the importance ratio, without which its gradient is biased, off policy most of all"""

    reference_ema_decay: float = 0.0
    """Reference policy: 0 keeps the initial weights; else it follows the policy, keeping this share at every sync"""

    reference_sync_interval: int = 1
    """Steps between two syncs of a reference policy that follows"""

    reference_cpu_offload: bool = False
    """Keep the reference policy's weights in host memory"""

    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus"""

    entropy_top_share: float = 1.0
    """Decoupled mode: only this share of a batch's tokens, those of highest entropy, enters the policy loss"""

    num_minibatches: int = 1
    """Optimizer steps per pass over a batch, each on its share of the groups"""

    num_iterations: int = 1
    """Passes over a batch"""

    scale_rewards: Literal["none", "group", "batch"] = "none"
    """Divide advantages by the standard deviation of the rewards in the group or batch"""

    reward_aggregation: Literal["sum", "normalize_each"] = "sum"
    """Several reward functions: sum, then advantages; or the advantages of each, then their weighted sum"""

    drop_zero_variance: bool = True
    """Drop groups whose rewards are all equal (counted), instead of training on zero advantages"""

    mask_truncated: bool = False
    """Leave completions that hit the length limit out of the loss"""

    mismatch_kl_alarm: float = 0.1
    """Warn when the divergence of the trainer's from the engine's log-probs (mismatch_kl) rises above; 0: never"""

    mismatch_kl_stop: float = 0.0
    """Save a checkpoint and stop the run after a step whose mismatch_kl is above; 0: never"""


@dataclass
class Rollout:
    dataset: str = "arithmetic"
    """`arithmetic` (built in), a .jsonl or .parquet file, or a Hugging Face dataset name (needs the `data` extra)"""

    dataset_split: str = "train"
    """Split of a Hugging Face dataset"""

    prompt_column: str = "prompt"
    """Column that holds the prompt: text, or a list of chat messages"""

    chat_template: bool = False
    """Wrap prompts in the tokenizer's chat template"""

    system_prompt: str = ""
    """System message in front of every prompt (chat_template only)"""

    shuffle: bool = True
    """Shuffle the prompts anew in every pass, from training.seed"""

    held_out_fraction: float = 0.1
    """Share of the dataset kept out of training for evaluation, where [eval] names no dataset of its own"""

    max_completion_tokens: int = 1024
    """Longest completion"""

    temperature: float = 1.0
    """Sampling temperature; the trainer's log-probs use the same"""

    top_p: float = 1.0
    """Nucleus sampling; 1 turns it off"""

    top_k: int = 0
    """Sample from the k most likely tokens; 0 turns it off"""

    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 turns it off"""

    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a completion, besides the end tokens of the checkpoint"""

    max_staleness: int = 2
    """A sample is admitted if trainer version − its oldest token's version is at most this; 0 to 8"""

    gate_on: Literal["oldest", "mean"] = "oldest"
    """Which token version the staleness gate looks at"""

    max_groups_in_flight: int = 0
    """Groups being generated or waiting for the trainer; 0 derives it from the batch and max_staleness"""

    data_timeout_s: float = 600.0
    """The run stops with a message when no completion arrived for this long"""

    replay: str = ""
    """Run folder whose recorded rollouts are trained on, without actors"""


@dataclass
class Rewards:
    functions: list[str] = field(default_factory=lambda: ["arithmetic"])
    """Built-in names or `package.module:function`, each with TRL's call convention"""

    weights: list[float] = field(default_factory=list)
    """One weight per function; empty means 1 each"""

    answer_column: str = "answer"
    """Column that holds the reference answer; passed to the functions under this name and as `answer`"""

    num_workers: int = 1
    """Reward worker processes"""

    timeout_s: float = 10.0
    """A reward call over one group's completions is cut off after this time"""

    memory_limit_mb: int = 2048
    """Address space that a reward worker may use beyond what it has at start"""


@dataclass
class Inference:
    backend: str = "embedded"
    """Engine that samples: embedded (part of this package), vllm or sglang (see docs/engines.md)"""

    mode: Literal["server", "colocate"] = "server"
    """Actors as separate processes, or on the trainer's own devices (vllm only)"""

    num_actors: int = 2
    """Inference actors that are started"""

    launch: bool = True
    """Start num_actors actors where no servers are named; false: never start one, servers have to be named"""

    servers: list[str] = field(default_factory=list)
    """Actors that run already, none is started then: URLs, or slurm:NODES:PORT with Slurm's notation of nodes, such as
    slurm:gpu[01-04,7]:8000 (a range 8000-8003 of ports is several actors per node)"""

    tensor_parallel_size: int = 1
    """Devices that share the model of one vllm or sglang actor; with colocate neighbouring ranks"""

    engine_python: str = ""
    """Python that runs the engine; empty takes the environment that scripts/install_engine.sh made"""

    engine_args: dict[str, Any] = field(default_factory=dict)
    """Options of the engine itself, handed on as they are: max-model-len = 1024 is --max-model-len 1024, true is the
    option alone, false leaves it out, a list is several values, a table is JSON"""

    engine_memory_gb: float = 0.0
    """Memory for one vllm or sglang actor's KV cache, in GiB; 0 decides from what there is"""

    sleep_level: int = 0
    """colocate, or with async_weight_update = false: while the trainer trains, the engines give back their KV cache and
    their weights, which 1 keeps in host memory and 2 drops; 0 keeps all. Started servers then have the ranks' GPUs"""

    sleep_timeout_s: float = 20.0
    """server: deadline for an actor to fall asleep, and for each of the two parts of waking"""

    offload_optimizer: bool = False
    """colocate: the optimizer's state is in host memory while the engine generates"""

    host: str = "127.0.0.1"
    """Address that started actors bind to"""

    threads_per_actor: int = 0
    """CPU threads of one actor; 0 decides from the cores"""

    pin_cores: bool = False
    """Keep each started actor on cores of its own, from the last one down; for trainers that compute on other cores"""

    max_sequences: int = 256
    """Sequences that one actor generates at a time"""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the actors hold weights and compute"""

    exact: bool = False
    """Rescore every completion with the trainer's own forward: mismatch 0 where one version sampled it, slower"""

    in_flight_kv: Literal["keep", "recompute"] = "keep"
    """What running requests do with their KV cache when new weights arrive"""

    update_mode: Literal["in_flight", "drain"] = "in_flight"
    """New weights are applied while requests run (tokens are tagged per version), or after the running ones ended"""

    drain_timeout_s: float = 5.0
    """drain: running requests get so long to end, then the weights are applied in flight; so long, too, before actors
    sleep (sleep_level), which those with unfinished requests do not do then"""

    startup_timeout_s: float = 120.0
    """Deadline for an actor to answer its first health probe"""

    request_timeout_s: float = 300.0
    """Deadline of one generate request"""

    health_interval_s: float = 1.0
    """Seconds between two health probes"""

    health_timeout_s: float = 10.0
    """An actor that has not answered for this long is taken out"""

    max_restarts: int = 5
    """How often one started actor is restarted before it is given up"""

    max_retries: int = 3
    """How often a group is redone after failures before the run stops"""


@dataclass
class WeightSync:
    host: str = "127.0.0.1"
    """Address by which actors, and trainer ranks, reach rank 0's machine; with the default only this machine does"""

    transport: str = "tcp"
    """How weights travel: tcp (host memory and sockets), disk (safetensors files), ipc (memory of the same machine),
    nccl (a communicator of its own per actor worker; gloo without CUDA)"""

    route: Literal["auto", "direct", "agent", "engine"] = "auto"
    """How a vllm or sglang server gets them: by our code inside the engine (direct), by an agent beside it that hands
    over whole verified versions (agent), or by the engine's own broadcast group (engine, weaker promises); auto is
    direct for vllm and agent for sglang"""

    verify: Literal["auto", "digest", "probe", "off"] = "auto"
    """Proof that actors hold what the trainer sent: checksums over the engine's live weights (digest), log-probs of a
    fixed prompt against the trainer's (probe), or none; auto is digest for embedded without adapters, else probe"""

    verify_every: int = 1
    """Versions from one such proof to the next"""

    probe_tolerance: float = 0.0
    """probe: largest mean difference of log-probs, in nats; 0 takes 0.001, or 0.03 where anything is bfloat16"""

    streams: int = 1
    """tcp: parallel connections per trainer rank and actor worker"""

    disk_path: str = ""
    """disk: folder that trainer and actors share; empty is weights/ in the run folder"""

    chunk_bytes: int = 4 * 1024 * 1024
    """nccl: bytes of one credited chunk"""

    chunk_timeout_s: float = 1.0
    """nccl: deadline of one chunk; a frozen actor can hold a device-wide call of the trainer for at most this long"""

    delta: bool = False
    """tcp: send only the elements that changed since the version that the actor has acknowledged; takes a slot more"""

    full_every: int = 20
    """delta: every so many versions are sent in full"""

    relay: bool = False
    """tcp: actors that hold a version pass it on, so that the trainer sends it a bounded number of times"""

    relay_fanout: int = 2
    """relay: actors that receive from the trainer, or from one actor, at a time"""

    num_slots: int = 3
    """Staging slots per trainer rank, each one policy version; at least 2"""

    bucket_bytes: int = 16 * 1024 * 1024
    """Bytes of one checksummed bucket"""

    join_timeout_s: float = 60.0
    """Deadline for an actor to join and to apply its first version"""

    offer_timeout_s: float = 5.0
    """Deadline for an actor to answer an offer"""

    progress_timeout_s: float = 5.0
    """A transfer that moved no byte for this long is aborted"""

    apply_timeout_s: float = 10.0
    """Deadline for an actor to acknowledge that it applied a version"""

    blocking_timeout_s: float = 60.0
    """async_weight_update = false: longest wait for all live actors"""

    evict_after_versions: int = 16
    """An actor without progress that falls this many versions behind is evicted"""

    snapshot_timeout_s: float = 60.0
    """A version that not all ranks have snapshotted within this time is dropped"""

    max_restarts: int = 5
    """How often in a row the coordinator or a courier is started again after it died"""

    @property
    def slots_per_rank(self) -> int:
        """num_slots, and with delta one for the version that deltas are taken against."""
        return self.num_slots + self.delta


@dataclass
class FaultInjection:
    enable: bool = False
    """Break the weight synchronisation on purpose, for tests; says so loudly"""

    seed: int = 0
    """Decides where faults with a probability strike"""

    faults: list[str] = field(default_factory=list)
    """action:key=value,...; see docs/reliability.md"""


@dataclass
class Eval:
    enable: bool = True
    """Evaluate on held-out prompts before the first step, periodically and at the end"""

    interval: int = 100
    """Steps between two evaluations; 0 evaluates only before the first step and at the end"""

    dataset: str = ""
    """Held-out prompts: a file or dataset name; empty takes the held-out share of rollout.dataset"""

    dataset_split: str = "test"
    """Split of eval.dataset where that is a Hugging Face dataset"""

    num_prompts: int = 128
    """Prompts per evaluation"""

    samples_per_prompt: int = 4
    """Sampled completions per prompt"""

    pass_at_k: list[int] = field(default_factory=lambda: [1, 4])
    """k of the reported pass@k, besides 1; each at most samples_per_prompt"""

    temperature: float = 1.0
    """Sampling temperature of pass@k"""

    greedy: bool = True
    """Report greedy accuracy beside it"""

    reward_function: str = ""
    """Reward that decides: a sample passes at 1.0; empty takes the first of rewards.functions"""

    timeout_s: float = 300.0
    """Deadline of one evaluation; when it passes the evaluation is logged as missing and training goes on"""


@dataclass
class JobConfig:
    """Everything one run needs to know; one attribute per TOML table."""

    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    lora: Lora = field(default_factory=Lora)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    comm: Comm = field(default_factory=Comm)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    grpo: GRPO = field(default_factory=GRPO)
    rollout: Rollout = field(default_factory=Rollout)
    rewards: Rewards = field(default_factory=Rewards)
    inference: Inference = field(default_factory=Inference)
    weight_sync: WeightSync = field(default_factory=WeightSync)
    fault_injection: FaultInjection = field(default_factory=FaultInjection)
    eval: Eval = field(default_factory=Eval)
