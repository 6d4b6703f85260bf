"""The actors that sample, and how new weights get to them."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic.dataclasses import dataclass

from torchtitan.config.values import TABLE, Count, CountOrZero, Names, NotNegative, Options, PathText, Positive, Range


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

    pin_cores: bool = False
    """Keep each started actor on cores of its own, from the last one down; for trainers that compute on other cores"""

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
