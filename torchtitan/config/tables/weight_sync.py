"""How new weights get to the actors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic.dataclasses import dataclass

from torchtitan.config.values import TABLE, Count, CountOrZero, Names, NotNegative, Positive, Range


@dataclass(config=TABLE)
class WeightSync:
    host: str = "127.0.0.1"
    """Address by which actors, and trainer ranks, reach rank 0's machine; with the default only this machine does"""

    transport: Annotated[str, Names(("tcp", "disk", "ipc", "nccl"))] = "tcp"
    """How weights travel: tcp (host memory and sockets), disk (safetensors files), ipc (memory of the same machine),
    nccl (a communicator of its own per actor worker; gloo without CUDA)"""

    route: Literal["auto", "direct", "agent", "engine"] = "auto"
    """How a vllm or sglang server gets them: by our code inside the engine (direct), by an agent beside it that hands
    over whole verified versions (agent), or by the engine's own broadcast group (engine, weaker promises); auto is
    direct for vllm and agent for sglang"""

    verify: Literal["auto", "digest", "probe", "off"] = "auto"
    """Proof that actors hold what the trainer sent: checksums over the engine's live weights (digest), log-probs of a
    fixed prompt against the trainer's (probe), or none; auto is digest for embedded without adapters, else probe"""

    verify_every: Count = 1
    """Versions from one such proof to the next"""

    probe_tolerance: NotNegative = 0.0
    """probe: largest mean difference of log-probs, in nats; 0 takes 0.001, or 0.03 where anything is bfloat16"""

    streams: Annotated[int, Range(1, 16)] = 1
    """tcp: parallel connections per trainer rank and actor worker"""

    disk_path: str = ""
    """disk: folder that trainer and actors share; empty is weights/ in the run folder"""

    chunk_bytes: Annotated[int, Range(1024, 2**30)] = 4 * 1024 * 1024
    """nccl: bytes of one credited chunk"""

    chunk_timeout_s: Positive = 1.0
    """nccl: deadline of one chunk; a frozen actor can hold a device-wide call of the trainer for at most this long"""

    delta: bool = False
    """tcp: send only the elements that changed since the version that the actor has acknowledged; takes a slot more"""

    full_every: Count = 20
    """delta: every so many versions are sent in full"""

    relay: bool = False
    """tcp: actors that hold a version pass it on, so that the trainer sends it a bounded number of times"""

    relay_fanout: Count = 2
    """relay: actors that receive from the trainer, or from one actor, at a time"""

    num_slots: Annotated[int, Range(2)] = 3
    """Staging slots per trainer rank, each one policy version; at least 2"""

    bucket_bytes: Annotated[int, Range(1024, 2**30)] = 16 * 1024 * 1024
    """Bytes of one checksummed bucket"""

    join_timeout_s: Positive = 60.0
    """Deadline for an actor to join and to apply its first version"""

    offer_timeout_s: Annotated[float, Range(1)] = 5.0
    """Deadline for an actor to answer an offer"""

    progress_timeout_s: Positive = 5.0
    """A transfer that moved no byte for this long is aborted"""

    apply_timeout_s: Positive = 10.0
    """Deadline for an actor to acknowledge that it applied a version"""

    blocking_timeout_s: Positive = 60.0
    """async_weight_update = false: longest wait for all live actors"""

    evict_after_versions: Count = 16
    """An actor without progress that falls this many versions behind is evicted"""

    snapshot_timeout_s: Positive = 60.0
    """A version that not all ranks have snapshotted within this time is dropped"""

    max_restarts: CountOrZero = 5
    """How often in a row the coordinator or a courier is started again after it died"""

    @property
    def slots_per_rank(self) -> int:
        """num_slots, and with delta one for the version that deltas are taken against."""
        return self.num_slots + self.delta
