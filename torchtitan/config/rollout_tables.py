"""The tables of what is sampled: prompts, sampling, rewards, environments and evaluation; the actors, and how new
weights get to them."""

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
    Options,
    PathText,
    Positive,
    Range,
    Share,
    ShareAboveZero,
    ShareBelowOne,
    Weights,
)


@dataclass(config=TABLE)
class Rollout:
    dataset: PathText = "arithmetic"
    """`arithmetic`, `guess` or `calculator` (built in), a .jsonl or .parquet file, or a Hugging Face dataset name
    (needs the `data` extra)"""

    dataset_split: str = "train"
    """Split of a Hugging Face dataset"""

    prompt_column: Column = "prompt"
    """Column that holds the prompt: text, or a list of chat messages"""

    chat_template: bool = False
    """Wrap prompts in the tokenizer's chat template"""

    system_prompt: str = ""
    """System message in front of every prompt (chat_template only)"""

    chat_template_kwargs: Options = field(default_factory=dict)
    """Variables of the chat template, wherever one is applied: {enable_thinking = false} (Qwen3)"""

    shuffle: bool = True
    """Shuffle the prompts anew in every pass, from training.seed"""

    held_out_fraction: ShareBelowOne = 0.1
    """Share of the dataset kept out of training for evaluation, where [eval] names no dataset of its own"""

    max_completion_tokens: Count = 1024
    """Longest completion"""

    temperature: Positive = 1.0
    """Sampling temperature; the trainer's log-probs use the same"""

    top_p: ShareAboveZero = 1.0
    """Nucleus sampling; 1 turns it off"""

    top_k: CountOrZero = 0
    """Sample from the k most likely tokens; 0 turns it off"""

    min_p: ShareBelowOne = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 turns it off"""

    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a completion, besides the end tokens of the checkpoint"""

    max_staleness: Annotated[int, Range(0, 8)] = 2
    """A sample is admitted if trainer version − its oldest token's version is at most this; 0 to 8"""

    max_groups_in_flight: CountOrZero = 0
    """Groups being generated or waiting for the trainer; 0 derives it from the batch and max_staleness"""

    data_timeout_s: Positive = 600.0
    """The run stops with a message when no completion arrived for this long"""

    replay: PathText = ""
    """Run folder whose recorded rollouts are trained on, without actors"""


@dataclass(config=TABLE)
class Rewards:
    functions: list[str] = field(default_factory=lambda: ["arithmetic"])
    """Built-in names or `package.module:function`, each with TRL's call convention"""

    weights: Weights = field(default_factory=list)
    """One weight per function; empty means 1 each"""

    answer_column: Column = "answer"
    """Column that holds the reference answer; passed to the functions under this name and as `answer`"""

    num_workers: Count = 1
    """Reward worker processes; async functions have one more"""

    async_calls: Count = 16
    """Calls of async functions, each over one group, that run side by side"""

    timeout_s: Positive = 10.0
    """A reward call over one group's completions is cut off after this time"""

    memory_limit_mb: Annotated[int, Range(16)] = 2048
    """Address space that a reward worker may use beyond what it has at start"""

    isolate: bool = False
    """Run the functions without a network, without a view of other processes, and with files that they can only read
    (Linux: bubblewrap, or user namespaces)"""


@dataclass(config=TABLE)
class Eval:
    enable: bool = True
    """Evaluate on held-out prompts before the first step, periodically and at the end"""

    interval: CountOrZero = 100
    """Steps between two evaluations; 0 evaluates only before the first step and at the end"""

    dataset: PathText = ""
    """Held-out prompts: a file or dataset name; empty takes the held-out share of rollout.dataset"""

    dataset_split: str = "test"
    """Split of eval.dataset where that is a Hugging Face dataset"""

    num_prompts: Count = 128
    """Prompts per evaluation"""

    samples_per_prompt: Count = 4
    """Sampled completions per prompt"""

    pass_at_k: list[int] = field(default_factory=lambda: [1, 4])
    """k of the reported pass@k, besides 1; each at most samples_per_prompt"""

    temperature: Positive = 1.0
    """Sampling temperature of pass@k"""

    greedy: bool = True
    """Report greedy accuracy beside it"""

    reward_function: str = ""
    """Reward that decides: a sample passes at 1.0; empty takes the first of rewards.functions"""

    stop_at: Share = 0.0
    """The run ends, as after its last step, with the first evaluation whose pass@1 is at least this; 0: never"""

    timeout_s: Positive = 300.0
    """Deadline of one evaluation; when it passes the evaluation is logged as missing and training goes on"""


@dataclass(config=TABLE)
class Environment:
    factory: str = ""
    """`package.module:Class` with reset(**row) and either step(action) or public methods as tools; empty: one turn"""

    tools: list[str] = field(default_factory=list)
    """Functions (`package.module:function`) that the policy may call as tools, with a factory or without"""

    agent: str = ""
    """A program with a loop of its own, which asks the policy through the gateway: `package.module:function` that gets
    base_url, key and row and returns a reward, or a command line"""

    verifiers: str = ""
    """The id of a verifiers taskset, which is played through the gateway in an environment of its own"""

    verifiers_harness: str = ""
    """The id of the harness that plays it; empty takes the taskset's own"""

    verifiers_renderer: str = "auto"
    """The renderer of the `renderers` package that makes tokens of its messages, such as qwen3"""

    verifiers_python: PathText = ""
    """Python that has verifiers; empty takes the environment that scripts/install_engine.sh made"""

    episode_timeout_s: Positive = 600.0
    """A whole episode of an agent may take so long"""

    tool_parser: Annotated[str, Names(("hermes",), own_function=True)] = "hermes"
    """How tool calls stand in a turn: JSON in <tool_call> tags, or a function from text to [(name, arguments)]"""

    max_turns: Count = 16
    """Turns of an episode; one that is not done by then is cut off (rollout.max_completion_tokens covers all turns)"""

    max_retries: CountOrZero = 2
    """An episode whose environment failed is begun again at most so often; then its group has one sample less"""

    num_workers: Count = 1
    """Environment worker processes; each has many episodes"""

    start_timeout_s: Positive = 30.0
    """Building and resetting an environment may take so long"""

    step_timeout_s: Positive = 10.0
    """One turn's step, or all its tool calls, may take so long"""

    memory_limit_mb: Annotated[int, Range(16)] = 2048
    """Address space that an environment worker may use beyond what it has at start"""


@dataclass(config=TABLE)
class Inference:
    backend: Annotated[str, Names(("embedded", "vllm", "sglang"))] = "embedded"
    """Engine that samples: embedded (part of this package), vllm or sglang (see docs/engines.md)"""

    mode: Literal["server", "colocate"] = "server"
    """Actors as separate processes, or on the trainer's own devices (vllm only)"""

    num_actors: Count = 2
    """Inference actors that are started"""

    launch: bool = True
    """Start num_actors actors where no servers are named; false: never start one, servers have to be named"""

    servers: list[str] = field(default_factory=list)
    """Actors that run already, none is started then: URLs, or slurm:NODES:PORT with Slurm's notation of nodes, such as
    slurm:gpu[01-04,7]:8000 (a range 8000-8003 of ports is several actors per node)"""

    tensor_parallel_size: Count = 1
    """Devices that share the model of one vllm or sglang actor; with colocate neighbouring ranks"""

    engine_python: PathText = ""
    """Python that runs the engine; empty takes the environment that scripts/install_engine.sh made"""

    engine_args: Options = field(default_factory=dict)
    """Options of the engine itself, handed on as they are: max-model-len = 1024 is --max-model-len 1024, true is the
    option alone, false leaves it out, a list is several values, a table is JSON"""

    engine_memory_gb: NotNegative = 0.0
    """Memory for one vllm or sglang actor's KV cache, in GiB; 0 decides from what there is"""

    sleep_level: Annotated[int, Range(0, 2)] = 0
    """colocate, or with async_weight_update = false: while the trainer trains, the engines give back their KV cache and
    their weights, which 1 keeps in host memory and 2 drops; 0 keeps all. Started servers then have the ranks' GPUs"""

    sleep_timeout_s: Positive = 20.0
    """server: deadline for an actor to fall asleep, and for each of the two parts of waking"""

    offload_optimizer: bool = False
    """colocate: the optimizer's state is in host memory while the engine generates"""

    host: str = "127.0.0.1"
    """Address that started actors bind to"""

    threads_per_actor: CountOrZero = 0
    """CPU threads of one actor; 0 decides from the cores"""

    max_sequences: Count = 256
    """Sequences that one actor generates at a time"""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the actors hold weights and compute; not named, it is bfloat16 for vllm and sglang where the ranks
    have GPUs"""

    exact: bool = False
    """Rescore every completion with the trainer's own forward: mismatch 0 where one version sampled it, slower"""

    in_flight_kv: Literal["keep", "recompute"] = "keep"
    """What running requests do with their KV cache when new weights arrive"""

    update_mode: Literal["in_flight", "drain"] = "in_flight"
    """New weights are applied while requests run (tokens are tagged per version), or after the running ones ended"""

    drain_timeout_s: Positive = 5.0
    """drain: running requests get so long to end, then the weights are applied in flight; so long, too, before actors
    sleep (sleep_level), which those with unfinished requests do not do then"""

    startup_timeout_s: Positive = 120.0
    """Deadline for an actor to answer its first health probe"""

    request_timeout_s: Positive = 300.0
    """Deadline of one generate request"""

    health_interval_s: Positive = 1.0
    """Seconds between two health probes"""

    health_timeout_s: Positive = 10.0
    """An actor that has not answered for this long is taken out"""

    max_restarts: CountOrZero = 5
    """How often one started actor is restarted before it is given up"""

    max_retries: CountOrZero = 3
    """How often a group is redone after failures before the run stops"""


@dataclass(config=TABLE)
class WeightSync:
    host: str = "127.0.0.1"
    """Address by which actors, and trainer ranks, reach rank 0's machine; with the default only this machine does"""

    port: Annotated[int, Range(0, 65000)] = 0
    """Where the registry listens, on rank 0's machine; the shard servers of a machine take the ports behind it, in the
    order of their local ranks. 0: any free ports"""

    transport: Annotated[str, Names(("tcp", "disk", "ipc", "nccl"))] = "tcp"
    """How weights travel: tcp (host memory and sockets), disk (safetensors files), ipc (memory of the same machine),
    nccl (a communicator of its own per actor worker; gloo without CUDA)"""

    route: Literal["auto", "direct", "agent"] = "auto"
    """How a vllm or sglang server gets them: by our code inside the engine (direct), or by an agent beside it that
    hands over whole verified versions (agent); auto is direct for vllm and agent for sglang"""

    verify: Literal["auto", "digest", "probe", "off"] = "auto"
    """Proof that actors hold what the trainer sent: what the engine computes with against what came (digest: embedded,
    and vllm by the direct route, without adapters), log-probs of a fixed prompt against the trainer's (probe), or none;
    auto is digest for embedded without adapters, else probe"""

    verify_every: Count = 1
    """Versions from one such proof to the next"""

    probe_tolerance: NotNegative = 0.0
    """probe: largest mean difference of log-probs, in nats; 0 takes what rounding explains: 0.001, or
    with bfloat16 0.01 · sqrt(layers), and 0.03 more for an engine whose logits are bfloat16"""

    disk_path: str = ""
    """disk: folder that trainer and actors share; empty is weights/ in the run folder"""

    chunk_bytes: Annotated[int, Range(1024, 2**30)] = 4 * 1024 * 1024
    """nccl: bytes of one credited chunk"""

    chunk_timeout_s: Positive = 1.0
    """nccl: deadline of one chunk; a frozen actor can hold a device-wide call of the trainer for at most this long"""

    delta: bool = False
    """tcp: send only the elements that changed since the version that the actor holds; takes a slot more"""

    relay: bool = False
    """tcp: actors that hold a version pass it on, so that the trainer sends it a bounded number of times"""

    relay_fanout: Count = 2
    """relay: actors that receive from the trainer, or from one actor, at a time"""

    num_slots: Annotated[int, Range(3)] = 3
    """Staging slots per trainer rank, each one policy version: one is written, one holds the newest, each further one
    holds an older version that slow actors finish meanwhile (a lane)"""

    lease_s: NotNegative = 0.0
    """Longest time for which slow actors may go on with a version that is not the newest any more; an actor that cannot
    finish one in it three times in a row is given up. 0: 60 s, and 4 s per GB of a version"""

    bucket_bytes: Annotated[int, Range(1024, 2**30)] = 16 * 1024 * 1024
    """Bytes of one checksummed bucket"""

    join_timeout_s: Positive = 60.0
    """Deadline for an actor to join and to apply its first version; an actor with one on its way is not hurried"""

    progress_timeout_s: Positive = 5.0
    """A transfer that moved no byte for this long is asked for again, over new connections"""

    apply_timeout_s: NotNegative = 0.0
    """Deadline for an actor to apply a version that it has received; 0: 10 s, and 2 s per GB of a version"""

    blocking_timeout_s: Positive = 60.0
    """async_weight_update = false: longest wait for all live actors"""

    snapshot_timeout_s: Positive = 60.0
    """A version that not all ranks have snapshotted within this time is dropped"""

    max_restarts: CountOrZero = 5
    """How often in a row the registry or a shard server is started again after it died or froze"""

    @property
    def slots_per_rank(self) -> int:
        """num_slots, and with delta one for the version that deltas are taken against."""
        return self.num_slots + self.delta
