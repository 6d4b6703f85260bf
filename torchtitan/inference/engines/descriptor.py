"""What an engine is to the rest of a run: one object that says what the engine can do, how it is started, and how it is
asked for tokens. Each engine has one, in the descriptor.py of its folder; registry.py finds it. No torch here.

docs/adding_an_engine.md is written along this class.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torchtitan.config.engines import EngineSpec
from torchtitan.config.job_config import JobConfig
from torchtitan.errors import UserError
from torchtitan.inference.actor_client import ActorClient
from torchtitan.inference.placement import EngineMemory, engine_devices
from torchtitan.inference.types import Completion, EngineCall, GenerateRequest, ScoredTokens
from torchtitan.utils.child_process import Starter

if TYPE_CHECKING:
    from torchtitan.inference.engines.replicas.replica import Replica
    from torchtitan.inference.engines.replicas.replica_pool import ReplicaPool


@dataclass
class TeacherScores:
    """What a teacher's answer says of the tokens that it was given. Engines may leave out numbers; the caller looks."""

    log_probs: list[float | None]
    """At temperature 1, of all tokens but the first"""
    likeliest: list[list[tuple[float | None, int | None]]]
    """Log-prob and id of the likeliest tokens in each of these places, in any order and perhaps with further tokens;
    empty unless they were asked for"""


@dataclass(frozen=True)
class Features:
    """What an engine can do besides sampling. Configurations that ask for more are refused (checks.py)."""

    in_flight_kv: tuple[str, ...] = ("keep", "recompute")
    """What inference.in_flight_kv may be"""
    update_modes: tuple[str, ...] = ("in_flight", "drain")
    """What inference.update_mode may be"""
    sleeps: bool = False
    """Whether it frees memory while the trainer trains (inference.sleep_level)"""
    reports_experts: bool = False
    """Whether it says which experts each token had (grpo.routing_replay)"""
    reports_experts_on_cpu: bool = True
    """Whether it does so without a GPU, too"""
    trainers_layers: bool = False
    """Whether it computes with the trainer's own layers, so that log-probs can be equal to the last bit"""
    two_sets: bool = False
    """Whether what comes over a connection is received into a second set of its weights, and nothing is copied"""
    any_family: bool = True
    """Whether it computes models whose layers the trainer takes from transformers"""


class EngineDescriptor:
    """One engine. A subclass overrides what differs; `spec` is what its engine.toml says."""

    features: ClassVar[Features] = Features()
    documentation: ClassVar[dict[str, str]]
    """Its column of the table in docs/engines.md: the cell for each title in documentation.TITLES"""

    def __init__(self, spec: EngineSpec):
        self.spec = spec

    # Before the start

    def problems(self, config: JobConfig, ranks: int) -> Iterator[tuple[str, str]]:
        """Yield (key, reason) of each key that cannot be as it is with this engine on any machine, besides what
        `features` says."""
        yield from ()

    def missing(self, config: JobConfig) -> Iterator[tuple[str, str]]:
        """Yield (key, reason) of what this machine lacks to start the engine."""
        yield from ()

    def digest_problem(self, config: JobConfig) -> str:
        """Return why weight_sync.verify cannot be `digest` here, or an empty string where it can."""
        return f"inference.backend {self.spec.name} cannot check its weights in this setup: use probe (or auto)"

    def python(self, config: JobConfig) -> str | None:
        """Return the interpreter that this run would start it with; None if it starts none, if that is our own, or
        none is installed here."""
        return None

    def node_settings(self, config: JobConfig) -> list[str]:
        """Return options, without host and port, of an actor that another program starts for this run on a node of its
        own (scripts/grpo_multinode.slurm). Raises UserError if the engine is not installed or not for that."""
        raise UserError(f"no nodes of their own are planned for inference.backend = {self.spec.name}")

    # Starting an actor

    def command(self, config: JobConfig, port_file: Path, number: int) -> list[str]:
        """Return the command line of the started actor `number` (from 0). The actor writes its port to `port_file` and
        serves nothing until it has its first weights version. Raises UserError if it cannot be started here."""
        raise NotImplementedError

    def environment(self, config: JobConfig, number: int) -> dict[str, str]:
        """Return the environment variables that this actor gets in addition to ours. Raises UserError if the ranks
        leave it too few GPUs."""
        return engine_devices(config, number)

    def prepare(self, config: JobConfig) -> None:
        """Begin to load what the actors of a run have in common. Called as its rank 0 begins; no torch here."""

    def starter(self, command: Sequence[str], environment: Mapping[str, str]) -> Starter | None:
        """Return the process from which an actor with this command line and environment is to come; None: it is
        started by itself."""
        return None

    def release(self) -> None:
        """End what `prepare` and `starter` have started in this process; actors live on. Called as a run ends."""

    def memory_share(self, memory: EngineMemory, device_bytes: int) -> float:
        """Return the share of a GPU of so many bytes that the engine is told to take."""
        return memory.utilization(device_bytes)

    # Running in the trainer's ranks

    def open_in_rank(self, config: JobConfig, run_dir: Path) -> AbstractContextManager[Replica | None]:
        """Open this rank's part of the engine (collective); None where the engine has actors. Raises UserError."""
        return contextlib.nullcontext()

    def open_pool(self, config: JobConfig, epoch: str, ranks: int) -> ReplicaPool | None:
        """Return what takes the rollouts' requests to the engine in all ranks; None where the engine has actors."""
        return None

    # Asking an actor

    def make_client(self, url: str, token: str, experts: int = 0, vocabulary: int | None = None) -> ActorClient:
        """Return a client of the actor at `url`; for `experts` and `vocabulary` see ActorClient."""
        raise NotImplementedError

    # Reading its answers. These run in another process where an answer is long.

    def completions(self, request: GenerateRequest, answer: bytes | memoryview) -> list[Completion]:
        """Return the completions in the answer to this request. The caller checks that they can be trained on.

        Raises NoVersion, RequestRefused, or a ValueError or KeyError for an answer of another form.
        """
        raise NotImplementedError

    def scored(self, token_ids: list[int], answer: bytes | memoryview) -> ScoredTokens:
        """Return the log-probs in the answer about these tokens; raises the same errors as `completions`."""
        raise NotImplementedError

    # Asking a server of it that is a teacher (distill.server.backend) and no actor of the run

    def ask_teacher(self, token_ids: list[int], top: int) -> EngineCall:
        """Return the call for the log-probs of these tokens, and of the `top` likeliest in each place."""
        raise NotImplementedError

    def taught(self, token_ids: list[int], top: int, answer: bytes | memoryview) -> TeacherScores:
        """Return what the answer to that call says. Raises ValueError, KeyError or IndexError for another form."""
        raise NotImplementedError
