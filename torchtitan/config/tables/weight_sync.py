"""How new weights get to the actors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic.dataclasses import dataclass

from torchtitan.config.values import TABLE, Count, CountOrZero, Names, NotNegative, Positive, Range


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
    """Proof that actors hold what the trainer sent: checksums over the engine's live weights (digest), log-probs of a
    fixed prompt against the trainer's (probe), or none; auto is digest for embedded without adapters, else probe"""

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
