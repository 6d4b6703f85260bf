"""The tables of what is sampled: prompts, sampling, rewards, environments and evaluation; the actors, and how new
weights get to them."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtitan.config.engine_tables import EngineTable
from torchtitan.config.engines import EngineSpec, engine_names, engine_specs, engine_tables, engines_meaning
from torchtitan.config.kinds import with_tables
from torchtitan.config.transports import MEANING, TRANSPORTS, TransportTable, transport_tables
from torchtitan.config.values import (
    TABLE,
    Column,
    Count,
    CountOrZero,
    Must,
    Names,
    NotNegative,
    OnceEach,
    Options,
    PathText,
    Positive,
    Range,
    Share,
    ShareAboveZero,
    ShareBelowOne,
    Weights,
)

# Bytes per second that deadlines take for granted where they follow from the size of a version.
APPLIED_PER_SECOND = 5e8
PULLED_PER_SECOND = 2.5e8


TemplateVariables = Annotated[
    Options,
    Must(
        {"messages", "tools", "add_generation_prompt"}.isdisjoint,
        "must not have messages, tools or add_generation_prompt, which every call sets",
    ),
]


@dataclass(config=TABLE)
class Rollout:
    dataset: PathText = "arithmetic"
    """`arithmetic`, `guess` or `calculator` (built in), a .jsonl or .parquet file, a function without arguments that
    returns the same rows every time (`package.module:function`), or a Hugging Face dataset `owner/name` or
    `owner/name:config`, of which all rows of the split train are used, or of another one as in `owner/name[test]`
    (needs the `data` extra)"""

    prompt_column: Column = "prompt"
    """Column that holds the prompt: text, or a list of chat messages"""

    chat_template: bool = False
    """Wrap prompts in the tokenizer's chat template"""

    system_prompt: str = ""
    """System message in front of every prompt (chat_template only)"""

    chat_template_kwargs: TemplateVariables = field(default_factory=dict)
    """Variables for the chat template, wherever it is applied: {enable_thinking = false} (Qwen3)"""

    sampler: Annotated[str, Names(("shuffle", "in_order", "variance"), own_function=True)] = "shuffle"
    """Which prompts are drawn: all of them in every pass, in a new order (shuffle, seeded by training.seed) or as they
    stand (in_order), more often those whose groups differ in their rewards (variance), or by weights of your own
    function, as package.module:function (docs/sources.md)"""

    held_out_fraction: ShareBelowOne = 0.1
    """Share of the dataset kept out of training, for evaluation if eval.dataset is empty"""

    max_completion_tokens: Count = 1024
    """Longest completion, in tokens"""

    temperature: Positive = 1.0
    """Sampling temperature; the trainer applies it to its log-probs too"""

    top_p: ShareAboveZero = 1.0
    """Nucleus sampling; 1 turns it off"""

    top_k: CountOrZero = 0
    """Sample from the k most likely tokens; 0 turns it off"""

    min_p: ShareBelowOne = 0.0
    """Drop tokens less likely than this share of the most likely token; 0 turns it off"""

    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a completion, besides the checkpoint's own end tokens"""

    max_staleness: Annotated[int, Range(0, 8)] = 2
    """A sample is admitted if the trainer's version minus the version of its oldest token is at most this"""

    data_timeout_s: Positive = 600.0
    """The run stops with a message if no completion arrives for this long"""

    replay: PathText = ""
    """Run folder whose recorded rollouts are trained on, without any actors"""

    journal_max_mb: CountOrZero = 0
    """MiB of the run's own record; above it the oldest steps are dropped, down to half, but none that ranks would train
    on again after a restart. Such a run cannot be replayed. 0 keeps all"""

    @property
    def shuffles(self) -> bool:
        """Whether a pass over all prompts has an order of its own."""
        return self.sampler != "in_order"

    @property
    def draws_by_results(self) -> bool:
        """Whether the rewards of groups decide which prompts are drawn."""
        return self.sampler not in ("shuffle", "in_order")


@dataclass(config=TABLE)
class Sandbox:
    """What runs in workers: reward functions; environments, tools and agents."""

    isolate: Literal["auto", True, False] = "auto"
    """Run it with read-only files except a scratch folder, without network, unable to see other processes (Linux:
    bubblewrap, or user namespaces; docs/reliability.md); agents reach the gateway all the same. auto: where that can be
    had, as the run says at its start"""

    memory_limit_mb: Annotated[int, Range(16)] = 2048
    """Memory, in MiB, that a worker may use beyond what it starts with, or each agent with all that it starts; what is
    only reserved does not count"""

    network: bool = False
    """What is isolated has this machine's network, which judges need"""

    readable: list[str] = field(default_factory=list)
    """Files and folders of the home folder that isolated code can read as well (docs/reliability.md)"""

    variables: list[str] = field(default_factory=list)
    """Environment variables with keys that it gets; others that look like keys are taken away"""


@dataclass(config=TABLE)
class Rewards:
    functions: OnceEach = field(default_factory=lambda: ["arithmetic"])
    """Built-in names or `package.module:function`, called as TRL calls reward functions"""

    weights: Weights = field(default_factory=list)
    """One weight per function; empty means 1 each"""

    answer_column: Column = "answer"
    """Column that holds the reference answer; the functions get it under this name and as `answer`, even if there is
    another column of that name"""

    num_workers: Count = 1
    """Reward worker processes; async functions have one more"""

    timeout_s: Positive = 10.0
    """Deadline of one reward call, which covers one group's completions"""

    sandbox: Sandbox = field(default_factory=Sandbox)


@dataclass(config=TABLE)
class Eval:
    interval: CountOrZero = 100
    """Steps between two evaluations, besides those before the first step and at the end; 0: only these two"""

    dataset: PathText = ""
    """Held-out prompts, named like rollout.dataset, but of a Hugging Face dataset the split test if the name has none;
    empty uses the held-out share of rollout.dataset"""

    num_prompts: CountOrZero = 128
    """Held-out prompts per evaluation; 0 evaluates nothing"""

    samples_per_prompt: Count = 4
    """Sampled completions per prompt; pass@k is reported for the powers of two up to this"""

    temperature: Positive = 1.0
    """Sampling temperature of pass@k"""

    greedy: bool = True
    """Report greedy accuracy as well"""

    reward_function: str = ""
    """Reward that decides whether a sample passes (at 1.0); empty uses the first of rewards.functions"""

    set: list[dict[str, Any]] = field(default_factory=list)
    """Evaluations by name, [[eval.set]] in TOML, in place of the one that this table describes"""

    stop_at: Share = 0.0
    """The run ends, as after its last step, at the first evaluation whose pass@1 is at least this; 0: never"""

    timeout_s: Positive = 300.0
    """Deadline of one evaluation; if it passes, the evaluation is logged as missing and training goes on"""

    @property
    def is_used(self) -> bool:
        """Whether the run evaluates anything."""
        return self.num_prompts > 0


RUNTIMES = ("subprocess", "docker", "podman", "apptainer", "prime", "modal", "e2b")
VerifiersRuntime = Annotated[
    Options, Must(lambda value: value.get("type") in RUNTIMES, f"its type must be {' or '.join(RUNTIMES)}")
]


@dataclass(config=TABLE)
class Verifiers:
    id: str = ""
    """Id of a verifiers taskset; it runs through the gateway, in a Python environment of its own"""

    harness: str = ""
    """Id of the harness that runs the taskset; empty uses the taskset's own"""

    renderer: str = "auto"
    """Renderer of the `renderers` package that turns its messages into tokens, such as qwen3"""

    python: PathText = ""
    """Python interpreter that has verifiers; empty uses the environment that scripts/install_engine.sh made"""

    runtime: VerifiersRuntime = field(default_factory=lambda: {"type": "subprocess"})
    """Where verifiers runs the programs of a harness, and the options of that runtime, as verifiers names them:
    {type = "docker", image = "python:3.11-slim", memory = 2}; or podman, apptainer, prime, modal or e2b"""


GatewayUrl = Annotated[
    str,
    Must(
        re.compile(r"(https?://[^/?#]+(?:(?!/v1/?$).)*)?").fullmatch,
        "must be http:// or https:// with a host, without /v1",
    ),
]


@dataclass(config=TABLE)
class Gateway:
    host: str = "127.0.0.1"
    """Address that the gateway binds to. With another one than the loopback, other machines and containers reach it;
    each episode has a key, but the connection is not encrypted"""

    port: Annotated[int, Range(0, 65535)] = 0
    """Port of the gateway; 0 uses any free port"""

    url: GatewayUrl = ""
    """Where programs reach the gateway, without /v1, such as the URL of a reverse proxy: {port} stands for the port.
    Empty is http:// with host and port"""


@dataclass(config=TABLE)
class Environment:
    factory: str = ""
    """`package.module:Class` with reset(**row) and either step(action) or public methods as tools; empty for none"""

    tools: OnceEach = field(default_factory=list)
    """Functions (`package.module:function`) that the policy may call as tools, with or without a factory"""

    agent: str = ""
    """A program with its own loop, which queries the policy through the gateway: a command line, or
    `package.module:function`, which gets base_url, key and row and returns a reward"""

    episode_timeout_s: Positive = 600.0
    """Deadline of a whole episode of an agent"""

    tool_parser: str = "auto"
    """How tool calls are written in a turn: as the chat template writes them (auto); hermes (JSON in <tool_call> tags,
    or as Llama 3 writes it), qwen3_coder, glm, deepseek, mistral, minimax_m2, kimi_k2, granite, phi4_mini, olmo3, lfm2
    or harmony (gpt-oss); or your own function from text to [(name, arguments)]"""

    max_turns: Count = 16
    """Most turns of an episode; one that is not done by then is cut off (rollout.max_completion_tokens covers all
    turns)"""

    on_failure: Literal["zero", "leave_out"] = "zero"
    """A sample whose own turn made its environment fail has reward 0 in training (zero), as it has not passed in an
    evaluation, or is left out of its group: then nothing keeps a policy from failing where it would be wrong"""

    num_workers: Count = 1
    """Environment worker processes; each hosts many episodes"""

    step_timeout_s: Positive = 10.0
    """Deadline of one turn's step, or of all its tool calls"""

    sandbox: Sandbox = field(default_factory=Sandbox)

    verifiers: Verifiers = field(default_factory=Verifiers)

    gateway: Gateway = field(default_factory=Gateway)

    max_retries: ClassVar[int] = 2
    """How often an episode is redone that failed, but not by its own turn; then its group has one sample less"""

    start_timeout_s: ClassVar[float] = 30.0
    """Deadline for building and resetting an environment"""

    @property
    def uses_gateway(self) -> bool:
        """Whether programs with a loop of their own talk to the policy."""
        return bool(self.agent or self.verifiers.id)

    @property
    def is_used(self) -> bool:
        """Whether the policy talks to an environment or to tools, over several turns."""
        return bool(self.factory or self.tools) or self.uses_gateway

    @property
    def reward_name(self) -> str:
        """The name of the reward that the environment gives: that of its class, or agent; empty where there is none."""
        return self.factory.rpartition(":")[2] or ("agent" if self.uses_gateway else "")

    def key(self, stop_token_ids: list[int]) -> str:
        """What the sources have in common that share the processes of this environment; empty if it is not used.
        stop_token_ids: the source's own."""
        if not self.is_used:
            return ""
        # Only the gateway has to know where completions end.
        return repr((self, stop_token_ids if self.uses_gateway else None))


@dataclass(config=TABLE)
@with_tables(engine_tables())
class Inference:
    backend: Annotated[str, Names(engine_names()), Field(description=engines_meaning())] = "embedded"

    num_actors: CountOrZero = 2
    """Inference actors to start if servers is empty; with 0, servers or discover must be set. An engine in the
    trainer's processes has one in each"""

    discover: bool = False
    """Take further actors that join the running job by its registry's address (weight_sync.port) and the token in
    TORCHTITAN_ACTOR_TOKEN, and that leave when they like (docs/engines.md)"""

    servers: list[str] = field(default_factory=list)
    """Actors that run already, instead of started ones: URLs, or slurm:NODES:PORT in Slurm's notation of nodes, such as
    slurm:gpu[01-04,7]:8000 (a range of ports, 8000-8003, is several actors per node)"""

    threads_per_actor: CountOrZero = 0
    """CPU threads of one actor; 0 divides the cores among the actors"""

    max_sequences: Count = 256
    """Sequences that one actor generates at a time"""

    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Type in which the actors hold weights and compute; if not set, it is bfloat16 for an engine that uses GPUs, where
    the ranks have some. auto is bfloat16 also on a processor with AVX512_BF16 or AMX, for models of 50 million
    parameters or more"""

    in_flight_kv: Literal["keep", "recompute"] = "keep"
    """Whether running requests keep or recompute their KV cache when new weights arrive"""

    update_mode: Literal["in_flight", "drain"] = "in_flight"
    """Apply new weights while requests run (in_flight; tokens are tagged with their version), or after running requests
    have finished (drain)"""

    sleep_level: Annotated[int, Range(0, 2)] = 0
    """While the trainer trains, the engines free their KV cache and their weights, which 1 keeps in host memory and 2
    drops; 0 frees nothing. Servers that the run starts then use the ranks' GPUs. All but a colocated engine need
    grpo.async_weight_update = false"""

    drain_timeout_s: Positive = 5.0
    """How long running requests may take to finish: with update_mode = drain before the weights are applied in flight
    all the same, with sleep_level before their actor sleeps; if they do not finish, it stays awake"""

    startup_timeout_s: Positive = 120.0
    """Deadline for an actor to answer its first health probe, and then to have its first version; one that is receiving
    a version gets more time"""

    request_timeout_s: Positive = 300.0
    """Deadline of one generate request"""

    health_timeout_s: Positive = 10.0
    """An actor that does not answer for this long is taken out of service"""

    max_restarts: ClassVar[int] = 5
    """How often one started actor is restarted before it is given up"""

    max_retries: ClassVar[int] = 3
    """How often a group is retried after failures, elsewhere if it can be, before the run stops"""

    sleep_timeout_s: ClassVar[float] = 20.0
    """Deadline for an actor to fall asleep, and for each of the two parts of waking"""

    @property
    def spec(self) -> EngineSpec:
        """What is known of the chosen engine."""
        return engine_specs()[self.backend]

    @property
    def engine(self) -> EngineTable:
        """The table of the chosen engine, which has the values of EngineTable where it has no keys of its own."""
        table: EngineTable = getattr(self, self.backend, None) or EngineTable()
        return table

    @property
    def drain_s(self) -> float:
        """How long running requests may go on before new weights come, in the time for which an apply may take."""
        return self.drain_timeout_s if self.update_mode == "drain" else 0.0

    def engine_key(self, name: str) -> str:
        """A key of the chosen engine's table, for messages."""
        return f"inference.{self.backend}.{name}"


OneAddress = Annotated[
    str,
    Must(
        lambda host: host.strip() not in ("", "0.0.0.0", "::"),
        "must be a single address at which this machine can be reached",
    ),
]


@dataclass(config=TABLE)
@with_tables(transport_tables())
class WeightSync:
    host: OneAddress = "127.0.0.1"
    """Address at which actors and trainer ranks reach rank 0's machine; the default works on that machine only"""

    port: Annotated[int, Range(0, 65000)] = 0
    """Port of the registry on rank 0's machine; the shard servers of each machine use the ports after it, in the order
    of their local ranks. 0 uses any free ports"""

    transport: Annotated[str, Names(tuple(TRANSPORTS)), Field(description=MEANING)] = "tcp"

    verify: Literal["auto", "digest", "probe", "off"] = "auto"
    """How to prove that actors hold what the trainer sent: digest compares what the engine computes with against what
    arrived (where the engine can: docs/engines.md), probe compares log-probs of a fixed prompt with the trainer's, off
    proves nothing, and does not hold sampled log-probs against the trainer's either; auto is digest for the embedded
    engine without adapters, otherwise probe"""

    probe_tolerance: NotNegative = 0.0
    """Largest mean difference of log-probs, in nats, of the probe and (divided by a temperature below 1) of what actors
    sample; 0 allows for rounding, types and mixtures as docs/engines.md says"""

    num_slots: Annotated[int, Range(3)] = 3
    """Staging slots per trainer rank, each for one version: one is being written, one holds the newest, and each
    further slot holds an older version that slow actors are still pulling"""

    apply_timeout_s: ClassVar[float] = 10.0
    """How long an actor may take to apply a version of few bytes, without draining (see apply_deadline)"""

    bucket_bytes: ClassVar[int] = 16 * 1024 * 1024
    """Bytes of one checksummed bucket; more for a version of which a rank would send more than about 4,096 buckets"""

    progress_timeout_s: ClassVar[float] = 5.0
    """A transfer that has moved no byte for this long is requested again, over new connections"""

    relay_fanout: ClassVar[int] = 2
    """With relay: hosts that receive from the trainer, or from another host, at the same time; on a host, actors that
    receive from one actor"""

    @property
    def table(self) -> TransportTable:
        """The table of the chosen transport, which has the values of TransportTable where it has no keys of its own."""
        table: TransportTable = getattr(self, self.transport, None) or TransportTable()
        return table

    @property
    def slots_per_rank(self) -> int:
        """num_slots, and with delta one for the version that deltas are taken against."""
        return self.num_slots + self.table.delta

    def apply_deadline(self, applied_bytes: int, drain_s: float) -> float:
        """Longest time, in seconds, for which an actor may apply a version that it has received: for draining, and for
        writing so many bytes."""
        return self.apply_timeout_s + drain_s + applied_bytes / APPLIED_PER_SECOND

    @staticmethod
    def pull_deadline(version_bytes: int) -> float:
        """Longest time, in seconds, for which slow actors may go on pulling a version of so many bytes that is no
        longer the newest; an actor that fails to finish one in this time three times in a row is given up."""
        return 60.0 + version_bytes / PULLED_PER_SECOND
