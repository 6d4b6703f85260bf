"""What is simulated: one key per figure, with its meaning and its range, from defaults, a file and flags."""

from __future__ import annotations

import json
import math
import statistics
import sys
import typing
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from torchtitan.config.draft import describe_type
from torchtitan.config.job_config import GRPO, Inference, Rollout, WeightSync, known_keys
from torchtitan.config.toml import show
from torchtitan.config.values import Range, nearest
from torchtitan.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

POSITIVE = Range(0, low_open=True)
NOT_NEGATIVE = Range(0)
COUNT = Range(1)
SHARE = Range(0, 1)
SYNC_TABLE = "weight_sync"


def _key(default: Any, text: str, values: Range | None = None) -> Any:
    return field(default=default, metadata={"text": text, "range": values})


@dataclass(frozen=True)
class Scenario:
    """A job's figures. Rates are per second, gigabytes are 1e9 bytes."""

    seed: int = _key(0, "decides every random number")
    hours: float = _key(1.0, "simulated training time", POSITIVE)

    ranks: int = _key(64, "trainer ranks; all send their own share of the weights", COUNT)
    train_s: float = _key(8.0, "seconds in which one rank trains on a batch, with the data at hand", POSITIVE)
    serial_share: float = _key(0.05, "share of train_s that more ranks do not shorten (--gpus)", SHARE)
    step_jitter: float = _key(0.02, "spread of a rank's time per batch (sigma of its logarithm)", NOT_NEGATIVE)
    slow_ranks: int = _key(0, "ranks that are always slower", NOT_NEGATIVE)
    slow_rank_factor: float = _key(1.2, "how much longer those take", POSITIVE)
    reserve_share: float = _key(0.7, "share of a batch's training before its slot is reserved", SHARE)
    first_update_share: float = _key(0.7, "share of it before parameters change for the first time", SHARE)

    gigabytes: float = _key(15.2, "weights in the actors' type", POSITIVE)
    snapshot_s: float = _key(1e-3, "what a snapshot takes of the trainer's time", NOT_NEGATIVE)
    snapshot_gigabytes_per_s: float = _key(20.0, "its copy of a rank's shards, beside the next step", POSITIVE)
    checksum_gigabytes_per_s: float = _key(5.0, "checksums of a slot, in its courier", POSITIVE)
    delta_share: float = _key(0.1, "bytes of a delta as a share of the full version", SHARE)

    rank_gigabytes_per_s: float = _key(2.5, "what one rank can send", POSITIVE)
    actor_gigabytes_per_s: float = _key(2.5, "what one actor can receive and check, and what it can send", POSITIVE)
    latency_s: float = _key(2e-4, "one way of a message", NOT_NEGATIVE)
    latency_jitter_s: float = _key(1e-4, "mean of what comes on top, at random", NOT_NEGATIVE)

    actors: int = _key(32, "inference actors", COUNT)
    gpus_per_actor: int = _key(1, "for --gpus", COUNT)
    tokens_per_s: float = _key(5000.0, "what one actor generates when it is full", POSITIVE)
    sequence_tokens_per_s: float = _key(100.0, "what one sequence gets at most", POSITIVE)
    max_sequences: int = _key(Inference.max_sequences, "sequences that an actor generates at once", COUNT)
    prepare_s: float = _key(0.1, "from the order to apply to the pause, while the actor generates", NOT_NEGATIVE)
    pause_s: float = _key(0.1, "pause of generation in which an actor copies its new weights", NOT_NEGATIVE)
    update_mode: Literal["in_flight", "drain"] = _key(Inference.update_mode, "as [inference] update_mode")
    drain_timeout_s: float = _key(Inference.drain_timeout_s, "as [inference] drain_timeout_s", NOT_NEGATIVE)
    slow_actors: int = _key(0, "actors that generate and receive slower", NOT_NEGATIVE)
    slow_actor_factor: float = _key(2.0, "how much slower", POSITIVE)
    health_timeout_s: float = _key(Inference.health_timeout_s, "a silent actor's requests are redone after", POSITIVE)

    crashes_per_hour: float = _key(0.0, "deaths of an actor", NOT_NEGATIVE)
    restart_s: float = _key(60.0, "until a dead actor is back, without weights", POSITIVE)
    freezes_per_hour: float = _key(0.0, "freezes of an actor", NOT_NEGATIVE)
    freeze_s: float = _key(30.0, "mean length of a freeze", POSITIVE)
    disconnects_per_hour: float = _key(0.0, "losses of an actor's connection to the coordinator", NOT_NEGATIVE)
    rejoin_s: float = _key(0.2, "until an actor dials again", POSITIVE)
    transfer_break_probability: float = _key(0.0, "that a data connection breaks during a delivery", SHARE)
    corruption_probability: float = _key(0.0, "that a byte of a delivery changes on its way", SHARE)
    apply_failure_probability: float = _key(0.0, "that applying fails half-way", SHARE)
    courier_crashes_per_hour: float = _key(0.0, "deaths of a rank's courier", NOT_NEGATIVE)
    courier_restart_s: float = _key(1.0, "until a dead courier is back", POSITIVE)

    groups_per_batch: int = _key(128, "prompts that one batch trains on", COUNT)
    group_size: int = _key(GRPO.group_size, "completions per prompt", Range(2))
    prompt_tokens: float = _key(200.0, "mean length of a prompt (counts as trained only)", NOT_NEGATIVE)
    completion_tokens: float = _key(600.0, "mean length of a completion before the limit", Range(1))
    completion_spread: float = _key(0.5, "spread of its length (sigma of its logarithm)", NOT_NEGATIVE)
    max_completion_tokens: int = _key(Rollout.max_completion_tokens, "longest completion", COUNT)
    max_staleness: int = _key(Rollout.max_staleness, "as [rollout] max_staleness", Range(0, 8))
    gate_on: Literal["oldest", "mean"] = _key(Rollout.gate_on, "as [rollout] gate_on")
    max_groups_in_flight: int = _key(Rollout.max_groups_in_flight, "as [rollout] max_groups_in_flight", NOT_NEGATIVE)
    usable_share: float = _key(1.0, "share of groups that can be trained on (rewards that differ)", Range(0.01, 1))
    reward_s: float = _key(0.0, "from a group's last token to its scores", NOT_NEGATIVE)

    aggregate: bool = _key(True, "ranks of equal speed share one representative; false: a slot keeper for each")
    weight_sync: WeightSync = field(default_factory=WeightSync, metadata={"text": "the [weight_sync] table"})

    def __post_init__(self) -> None:
        problems = [
            f"{name} = {show(value)}: must be {values}"
            for name, value in self.values().items()
            if (values := _range(name)) is not None and value not in values
        ]
        if self.slow_ranks > self.ranks:
            problems.append(f"slow_ranks = {self.slow_ranks}: there are {self.ranks} ranks")
        if self.slow_actors > self.actors:
            problems.append(f"slow_actors = {self.slow_actors}: there are {self.actors} actors")
        if problems:
            raise ConfigError(problems)

    def values(self) -> dict[str, Any]:
        """Every key and its value; those of the table as weight_sync.key."""
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name != SYNC_TABLE}
        return own | {f"{SYNC_TABLE}.{item.name}": getattr(self.weight_sync, item.name) for item in fields(WeightSync)}

    def with_values(self, values: Mapping[str, Any]) -> Scenario:
        """Some keys replaced (flat, as `values` has them). Raises ConfigError for unknown keys and wrong values."""
        known, problems = key_types(), []
        own: dict[str, Any] = {}
        sync: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known:
                problems.append(f"unknown key {name!r}{nearest(name, known)}")
                continue
            try:
                converted = TypeAdapter(known[name]).validate_python(value, strict=True)
            except ValidationError:
                problems.append(f"{name} = {show(value)}: must be {describe_type(known[name])}")
                continue
            table, _, key = name.rpartition(".")
            (sync if table else own)[key] = converted
        if problems:
            raise ConfigError(problems)
        # Not `replace`, which refuses what is out of range: that is reported with the rest.
        weight_sync = copy(self.weight_sync)
        vars(weight_sync).update(sync)
        return replace(self, **own, weight_sync=weight_sync)

    def split(self, ranks: int, actors: int) -> Scenario:
        """The same job on other numbers of ranks and actors.

        train_s is that of `self.ranks`: a share serial_share of it stays, the rest shrinks as ranks grow in number.
        """
        share = self.serial_share + (1 - self.serial_share) * self.ranks / ranks
        slow_ranks, slow_actors = self.slow_ranks * ranks // self.ranks, self.slow_actors * actors // self.actors
        return replace(
            self, ranks=ranks, actors=actors, train_s=self.train_s * share, slow_ranks=slow_ranks,
            slow_actors=slow_actors,
        )  # fmt: skip

    @property
    def seconds(self) -> float:
        return self.hours * 3600

    @property
    def shard_bytes(self) -> float:
        """What one rank holds and sends."""
        return self.gigabytes * 1e9 / self.ranks

    @property
    def samples_per_batch(self) -> int:
        return self.groups_per_batch * self.group_size


def slowest_of(count: int, share: float) -> float:
    """How many standard deviations the largest of `count` normal numbers is off, at this quantile (0 to 1)."""
    return statistics.NormalDist().inv_cdf(min(max(share, 1e-12), 1 - 1e-12) ** (1 / count))


def straggling(ranks: int, jitter: float) -> float:
    """By what factor the slowest of equal ranks is typically slower than one rank."""
    return math.exp(jitter * slowest_of(ranks, 0.5))


def key_types() -> dict[str, Any]:
    """Key -> type."""
    own = typing.get_type_hints(Scenario)
    found = {item.name: own[item.name] for item in fields(Scenario) if item.name != SYNC_TABLE}
    sync = typing.get_type_hints(WeightSync)
    return found | {f"{SYNC_TABLE}.{item.name}": sync[item.name] for item in fields(WeightSync)}


def key_texts() -> dict[str, str]:
    """Key -> what it means; those of the table are in docs/config.md."""
    return {item.name: item.metadata["text"] for item in fields(Scenario) if item.name != SYNC_TABLE}


def _range(name: str) -> Range | None:
    if name.startswith(f"{SYNC_TABLE}."):
        return next((rule for rule in known_keys()[name].metadata if isinstance(rule, Range)), None)
    for item in fields(Scenario):
        if item.name == name:
            return item.metadata.get("range")
    return None


def read_scenario(path: Path) -> dict[str, Any]:
    """Flat keys of a TOML or (suffix .json) JSON file. Raises ConfigError where it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError([f"scenario {path} cannot be read: {error.strerror}"]) from error
    except ValueError as error:
        raise ConfigError([f"scenario {path} is not valid {path.suffix.lstrip('.') or 'TOML'}: {error}"]) from error
    if not isinstance(table, dict):
        raise ConfigError([f"scenario {path}: an object of keys is needed"])
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return flat
