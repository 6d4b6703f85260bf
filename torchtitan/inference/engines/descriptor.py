"""What an engine is to the rest of a run: one object that says what the engine can do, how it is started, and how it is
asked for tokens. Each engine has one, in the descriptor.py of its folder; registry.py finds it. No torch here.

docs/adding_an_engine.md is written along this class.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchtitan.config.engines import EngineSpec
from torchtitan.config.job_config import JobConfig
from torchtitan.inference.actor_client import ActorClient
from torchtitan.inference.placement import EngineMemory, engine_devices
from torchtitan.inference.types import Call, Completion, GenerateRequest, ScoredTokens


@dataclass
class TeacherScores:
    """What a teacher's answer says of the tokens that it was given. Engines may leave out numbers; the caller looks."""

    log_probs: list[float | None]
    """At temperature 1, of all tokens but the first"""
    likeliest: list[list[tuple[float | None, int | None]]]
    """Log-prob and id of the likeliest tokens in each of these places, in any order and perhaps with further tokens;
    empty unless they were asked for"""


class EngineDescriptor:
    """One engine. A subclass overrides what differs; `spec` is what its engine.toml says."""

    def __init__(self, spec: EngineSpec):
        self.spec = spec

    # Starting an actor

    def command(self, config: JobConfig, port_file: Path, number: int) -> list[str]:
        """Return the command line of the started actor `number` (from 0). The actor writes its port to `port_file` and
        serves nothing until it has its first weights version. Raises UserError if it cannot be started here."""
        raise NotImplementedError

    def environment(self, config: JobConfig, number: int) -> dict[str, str]:
        """Return the environment variables that this actor gets in addition to ours. Raises UserError if the ranks
        leave it too few GPUs."""
        return engine_devices(config, number)

    def memory_share(self, memory: EngineMemory, device_bytes: int) -> float:
        """Return the share of a GPU of so many bytes that the engine is told to take."""
        return memory.utilization(device_bytes)

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

    # Asking a server of it that is a teacher (distill.teacher_backend) and no actor of the run

    def ask_teacher(self, token_ids: list[int], top: int) -> Call:
        """Return the call for the log-probs of these tokens, and of the `top` likeliest in each place."""
        raise NotImplementedError

    def taught(self, token_ids: list[int], top: int, answer: bytes | memoryview) -> TeacherScores:
        """Return what the answer to that call says. Raises ValueError, KeyError or IndexError for another form."""
        raise NotImplementedError
