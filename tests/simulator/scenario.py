"""The parameters of a simulation with their meanings and ranges, from defaults, a file and flags."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from pydantic import ValidationError
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from torchtitan.config.job_config import GRPO, Inference, Rollout, WeightSync
from torchtitan.config.transports import Tcp
from torchtitan.config.values import TABLE, Count, CountOrZero, NotNegative, Positive, Share, ShareAboveZero, show
from torchtitan.errors import ConfigError, nearest

PREFIX, TCP = "weight_sync.", "weight_sync.tcp."
"""Prefixes of the keys of these tables"""


@dataclass(config=TABLE, frozen=True)
class Scenario:
    """A job's parameters. Rates are per second; a gigabyte is 1e9 bytes."""

    seed: int = 0
    """decides every random number"""
    hours: Positive = 1.0
    """simulated training time"""

    ranks: Count = 64
    """trainer ranks; all send their own share of the weights"""
    train_s: Positive = 8.0
    """seconds in which one rank trains on a batch, with the data at hand"""
    step_jitter: NotNegative = 0.02
    """spread of a rank's time per batch (sigma of its logarithm)"""
    reserve_share: Share = 0.7
    """share of a batch's training before its slot is reserved"""

    gigabytes: Positive = 15.2
    """weights in the actors' type"""
    snapshot_s: NotNegative = 1e-3
    """what a snapshot takes of the trainer's time"""
    snapshot_gigabytes_per_s: Positive = 20.0
    """its copy of a rank's shards, beside the next step"""
    checksum_gigabytes_per_s: Positive = 5.0
    """checksums of a slot, in its shard server"""
    delta_share: ShareAboveZero = 0.1
    """bytes of a delta as a share of the full version"""

    rank_gigabytes_per_s: Positive = 2.5
    """what one rank can send"""
    actor_gigabytes_per_s: Positive = 2.5
    """what one actor's network can receive, and what it can send"""
    thread_s_per_gigabyte: Positive = 0.25
    """processor time of a thread that sends, or receives and checks, a gigabyte"""
    latency_s: NotNegative = 2e-4
    """one way of a message"""
    latency_jitter_s: NotNegative = 1e-4
    """mean of what comes on top, at random for each connection"""

    actors: Count = 32
    """inference actors"""
    tokens_per_s: Positive = 5000.0
    """what one actor generates when it is full"""
    sequence_tokens_per_s: Positive = 100.0
    """what one sequence gets at most"""
    max_sequences: Count = Inference.max_sequences
    """sequences that an actor generates at once"""
    prepare_s: NotNegative = 0.1
    """from a whole version to the pause, while the actor generates"""
    pause_s: NotNegative = 0.1
    """pause of generation in which an actor copies its new weights"""
    slow_actors: CountOrZero = 0
    """actors that generate and receive slower"""
    slow_actor_factor: Positive = 2.0
    """how much slower"""
    health_timeout_s: Positive = Inference.health_timeout_s
    """a silent actor's requests are redone after"""

    crashes_per_hour: NotNegative = 0.0
    """deaths of an actor"""
    restart_s: Positive = 60.0
    """until a dead actor is back, without weights"""
    freezes_per_hour: NotNegative = 0.0
    """freezes of an actor"""
    freeze_s: Positive = 30.0
    """mean length of a freeze"""
    corruption_probability: Share = 0.0
    """that a byte of a bucket changes on its way"""

    groups_per_batch: Count = 128
    """prompts that one batch trains on"""
    group_size: Count = GRPO.group_size
    """completions per prompt"""
    prompt_tokens: NotNegative = 200.0
    """mean length of a prompt (counts as trained only)"""
    completion_tokens: Positive = 600.0
    """mean length of a completion before the limit"""
    completion_spread: NotNegative = 0.5
    """spread of its length (sigma of its logarithm)"""
    max_completion_tokens: Count = Rollout.max_completion_tokens
    """longest completion"""
    max_staleness: CountOrZero = Rollout.max_staleness
    """as [rollout] max_staleness"""
    usable_share: ShareAboveZero = 1.0
    """share of groups that can be trained on (rewards that differ)"""

    weight_sync: WeightSync = field(default_factory=WeightSync)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Scenario:
        """Make a scenario from flat keys (the table's as weight_sync.key). Raises ConfigError for mistakes."""
        given_by_table: dict[str, dict[str, Any]] = {TCP: {}, PREFIX: {}, "": {}}
        for name, value in values.items():
            prefix = next(prefix for prefix in given_by_table if name.startswith(prefix))
            given_by_table[prefix][name.removeprefix(prefix)] = value
        tcp, sync, scenario = given_by_table.values()
        problems = []
        for prefix, table, given in ((TCP, Tcp, tcp), (PREFIX, WeightSync, sync), ("", cls, scenario)):
            try:
                table(**given)
            except ValidationError as error:
                problems += [_problem(prefix, mistake) for mistake in error.errors()]
        if problems:
            raise ConfigError(problems)
        tables: dict[str, Any] = {"tcp": Tcp(**tcp)}
        return cls(**scenario, weight_sync=WeightSync(**sync, **tables))

    @property
    def seconds(self) -> float:
        return self.hours * 3600

    @property
    def shard_bytes(self) -> float:
        """How much one rank holds and sends."""
        return self.gigabytes * 1e9 / self.ranks

    @property
    def thread_bytes_per_s(self) -> float:
        """What one thread can move."""
        return 1e9 / self.thread_s_per_gigabyte

    @property
    def process_bytes_per_s(self) -> float:
        """What one process can move. With a single connection to each shard server, one thread serves them all."""
        return self.thread_bytes_per_s if self.weight_sync.table.connections == 1 else math.inf


def known_keys() -> dict[str, FieldInfo]:
    """Return key -> its default and meaning."""
    tables: tuple[tuple[str, Any], ...] = (("", Scenario), (PREFIX, WeightSync), (TCP, Tcp))
    keys = ((f"{prefix}{name}", info) for prefix, table in tables for name, info in table.__pydantic_fields__.items())
    return {name: info for name, info in keys if info.default_factory is None}


def _problem(prefix: str, error: ErrorDetails) -> str:
    name = f"{prefix}{error['loc'][0]}"
    hint = "" if name in known_keys() else nearest(name, known_keys())
    return f"{name} = {show(error['input'])}: {error['msg']}{hint}"


def slowest_of(count: int, share: float) -> float:
    """Return the quantile `share` (0 to 1) of the largest of `count` standard normal numbers."""
    return statistics.NormalDist().inv_cdf(min(max(share, 1e-12), 1 - 1e-12) ** (1 / count))
